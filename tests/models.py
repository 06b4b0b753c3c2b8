"""Tiny random Hope models and states for tests: odd sizes, float64, fixed seeds."""

from __future__ import annotations

import numpy as np

from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.reference import Parameters, unit
from fednl_runtime.state import Array, MemoryState, Tensors

TINY = HopeConfig(
    vocab_size=11,
    d_model=6,
    n_head=2,
    layers=("delta", "self_modifying"),
    d_memory=5,
    memory_period=4,
    d_conv=3,
    cms_periods=(2, 6),
    d_cms=7,
    cms_rank=3,
    top_rank=3,
    top_period=5,
)
"""Two layers, one of each profile, with periods short enough to cross many boundaries."""


def random_layer(rng: np.random.Generator, c: HopeConfig, profile: str) -> Tensors:
    """The parameters of one block, by name without the layer's prefix."""
    d, n, r = c.d_model, c.n_cms, c.cms_rank
    heads = len(MEMORIES) * c.n_head
    layer = {
        "norm": 1 + 0.1 * rng.normal(size=d),
        "w_in": rng.normal(size=(5 * d, d)) / np.sqrt(d),
        "conv": rng.normal(size=(4 * d, c.d_conv)) * 0.3 + np.eye(c.d_conv)[-1],
        "r_eta": rng.normal(size=(c.n_head, c.d_head)),
        "b_eta": rng.normal(size=c.n_head),
        "r_alpha": rng.normal(size=(c.n_head, c.d_head)),
        "b_alpha": 3 + rng.normal(size=c.n_head),
        "head_norm": 1 + 0.1 * rng.normal(size=c.d_head),
        "w_out": rng.normal(size=(d, d)) / np.sqrt(d),
        "cms_norm": 1 + 0.1 * rng.normal(size=(n, d)),
        "cms_in": rng.normal(size=(n, c.d_cms + r + d, d)) / np.sqrt(d),
        "cms_out": rng.normal(size=(n, d, c.d_cms)) / np.sqrt(c.d_cms),
        "cms_step": rng.normal(size=n),
        "cms_decay": 2 + rng.normal(size=n),
    }
    if profile == "self_modifying":
        layer["w1_init"] = 0.3 * rng.normal(size=(heads, c.d_memory, c.d_head))
        layer["w2_init"] = rng.normal(size=(heads, c.d_head, c.d_memory)) / np.sqrt(c.d_head)
    return layer


def random_params(c: HopeConfig = TINY, seed: int = 0) -> Parameters:
    """Random parameters of every tensor a model has, float64."""
    rng = np.random.default_rng(seed)
    params = {
        "embedding": rng.normal(size=(c.vocab_size, c.d_model)) / np.sqrt(c.d_model),
        "norm": 1 + 0.1 * rng.normal(size=c.d_model),
    }
    if c.top_rank:
        params |= {
            "top.p": rng.normal(size=(c.top_rank, c.d_model)),
            "top.step": rng.normal(size=()),
            "top.decay": 2 + rng.normal(size=()),
        }
    for i, profile in enumerate(c.layers):
        params |= {f"layers.{i}.{name}": value for name, value in random_layer(rng, c, profile).items()}
    return params


def random_state(c: HopeConfig = TINY, batch: int = 1, seed: int = 1, position: int = 0) -> MemoryState:
    """A state in which nothing is zero, each row at its own position from `position` on."""
    rng = np.random.default_rng(seed)
    zeros = MemoryState.zeros(c, batch, np.float64)
    tensors: dict[str, Array] = {name: 0.3 * rng.normal(size=t.shape) for name, t in zeros.tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith("cms_g"):
            tensors[name] = tensor @ tensor.swapaxes(-1, -2)
    if c.top_rank:
        tensors["top.p"] = unit(tensors["top.p"], c.norm_eps)
        tensors["top.token"] = rng.integers(0, c.vocab_size, tensors["top.token"].shape).astype(float)
    return MemoryState(tensors, np.arange(position, position + batch, dtype=np.int64))


def random_tokens(
    c: HopeConfig, batch: int, length: int, seed: int = 2
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Uniform token ids `[B, T]`."""
    return np.random.default_rng(seed).integers(0, c.vocab_size, (batch, length))
