"""The memory of a session: names, shapes, bytes. Layouts are `[B, H, K, V]` everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fednl_runtime.config import INPUTS, MEMORIES, HopeConfig
from fednl_runtime.errors import StateError

Array: TypeAlias = npt.NDArray[np.floating]
Tensors: TypeAlias = dict[str, Array]
Tokens: TypeAlias = npt.NDArray[np.int64]


def state_shapes(config: HopeConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every state tensor of one session, without the batch axis, by name.

    `{layer}.conv [K-1, 4d]`, `{layer}.s [H, h, h]` (delta) or `{layer}.w1, w2` and their boundary
    copies `[5H, m, h]`, `[5H, h, m]` (self-modifying, memory-major), `{layer}.cms_f, cms_a [k, r, d]`,
    `{layer}.cms_g [k, r, r]`, and the top level's `top.f [r, d]` with its pending chunk
    `top.h [C, d]`, `top.p [C, r]`, `top.token [C]`.
    """
    c = config
    heads = len(MEMORIES) * c.n_head
    shapes: dict[str, tuple[int, ...]] = {}
    for i, profile in enumerate(c.layers):
        shapes[f"{i}.conv"] = (c.d_conv - 1, len(INPUTS) * c.d_model)
        if profile == "delta":
            shapes[f"{i}.s"] = (c.n_head, c.d_head, c.d_head)
        else:
            for suffix in ("_boundary", ""):
                shapes[f"{i}.w1{suffix}"] = (heads, c.d_memory, c.d_head)
                shapes[f"{i}.w2{suffix}"] = (heads, c.d_head, c.d_memory)
        if c.n_cms:
            shapes[f"{i}.cms_f"] = (c.n_cms, c.cms_rank, c.d_model)
            shapes[f"{i}.cms_a"] = (c.n_cms, c.cms_rank, c.d_model)
            shapes[f"{i}.cms_g"] = (c.n_cms, c.cms_rank, c.cms_rank)
    if c.top_rank:
        shapes["top.f"] = (c.top_rank, c.d_model)
        shapes["top.h"] = (c.top_period, c.d_model)
        shapes["top.p"] = (c.top_period, c.top_rank)
        shapes["top.token"] = (c.top_period,)
    return shapes


def state_bytes(config: HopeConfig) -> int:
    """Bytes of one session's fp32 state tensors; a function of the configuration alone."""
    return 4 * sum(int(np.prod(shape)) for shape in state_shapes(config).values())


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """Fast weights, pending statistics and position of `B` sessions.

    Every tensor is a difference from learned initial weights, so zeros are a fresh session of any
    model with the same shapes. `position [B]` int64 counts the tokens seen.
    """

    tensors: Tensors
    position: Tokens

    @classmethod
    def zeros(cls, config: HopeConfig, batch: int = 1, dtype: npt.DTypeLike = np.float32) -> MemoryState:
        """A fresh session for each of `batch` rows."""
        tensors = {name: np.zeros((batch, *shape), dtype) for name, shape in state_shapes(config).items()}
        return cls(tensors, np.zeros(batch, np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the state tensors, all rows; the 8 bytes of each position are not counted."""
        return sum(t.nbytes for t in self.tensors.values())

    def copy(self) -> MemoryState:
        """An owning copy: later writes to either leave the other alone."""
        return MemoryState({n: t.copy() for n, t in self.tensors.items()}, self.position.copy())

    def row(self, index: int) -> MemoryState:
        """An owning copy of one row as a batch of one."""
        rows = slice(index, index + 1)
        return MemoryState({n: t[rows].copy() for n, t in self.tensors.items()}, self.position[rows].copy())

    @classmethod
    def stack(cls, states: list[MemoryState]) -> MemoryState:
        """One batch out of several states of the same model."""
        names = states[0].tensors
        tensors = {n: np.concatenate([s.tensors[n] for s in states]) for n in names}
        return cls(tensors, np.concatenate([s.position for s in states]))


def check_state(tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise StateError unless `tensors` (with a batch axis) are exactly those of `shapes`."""
    if missing := sorted(set(shapes) - set(tensors)):
        raise StateError(f"The state lacks {', '.join(missing)}. It belongs to another model.")
    if extra := sorted(set(tensors) - set(shapes)):
        raise StateError(f"The state holds unknown tensors {', '.join(extra)}. It belongs to another model.")
    for name, shape in shapes.items():
        if tensors[name].shape[1:] != shape:
            raise StateError(f"State tensor {name} is {tensors[name].shape[1:]}; this model needs {shape}.")
