"""Laws of the Triton kernels: the NumPy law at odd sizes in the interpreter, and machine code for two GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import interpreter as worker
import numpy as np
import pytest
import torch
from models import TINY, random_layer, random_params, random_state, random_tokens

from fednl_runtime import reference
from fednl_runtime.config import HopeConfig
from fednl_runtime.state import state_shapes

pytest.importorskip("triton", reason="the kernels need triton: pip install 'fednl-runtime[gpu]'")

CLOSE = {"rtol": 0, "atol": 1e-4}
ADAPT = np.array([[1, 1], [0.5, 1], [0, 1]])
CLOSING = np.array([True, False, True])
sizes = pytest.mark.parametrize(("heads", "width", "hidden"), [(1, 5, 3), (3, 20, 9)], ids=["H1-5x3", "H3-20x9"])
lengths = pytest.mark.parametrize("length", [1, 3, 16])


@pytest.fixture(scope="module")
def ask():
    with worker.interpreter() as answer:
        yield answer


def config(profile: str, heads: int, width: int, hidden: int) -> HopeConfig:
    return dataclasses.replace(TINY, layers=(profile,), n_head=heads, d_model=heads * width, d_memory=hidden)


def start_of(c: HopeConfig, length: int):
    """Unit inputs `[4, B, H, T, h]` of the memories, a layer, and a state of three rows in which nothing is zero."""
    rng = np.random.default_rng(0)
    u = reference.unit(rng.normal(size=(4, 3, c.n_head, length, c.d_head)), c.norm_eps)
    own = {n.removeprefix("0."): t for n, t in random_state(c, 3).tensors.items()}
    return u, random_layer(rng, c, c.layers[0]), own


@sizes
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (3, 64), (16, 16), (37, 16), (21, 64)])
def test_delta_is_the_law_whatever_the_chunk(length, chunk, heads, width, hidden, ask):
    c = config("delta", heads, width, hidden)
    (k, v, q, g), layer, state = start_of(c, length)
    gates = [reference.gates(layer, g[:, :, t], g[:, :, t], ADAPT, c) for t in range(length)]
    eta, log_alpha = (np.stack(x, 2) for x in zip(*gates, strict=True))
    inputs = {"q": q, "k": k, "v": v, "eta": eta, "log_alpha": log_alpha, "s": state["s"]}
    y, s = ask(worker.delta, inputs, chunk)
    for t in range(length):
        u = np.stack([x[:, :, t] for x in (k, v, q, g)])
        expected, state = reference.delta_mixer(u, layer, state, ADAPT, c)
        np.testing.assert_allclose(y[:, :, t], expected, **CLOSE)
    np.testing.assert_allclose(s, state["s"], **CLOSE)


@sizes
@lengths
def test_the_five_memories_are_the_law_with_promotion_and_scale_of_each_row(length, heads, width, hidden, ask):
    c = config("self_modifying", heads, width, hidden)
    u, layer, state = start_of(c, length)
    y, new = ask(worker.self_modifying, u, layer, state, ADAPT, CLOSING, c)
    for t in range(length):
        closing = CLOSING & (t == 0)
        expected, state = reference.self_modifying_mixer(u[:, :, :, t], layer, state, ADAPT, closing, c)
        np.testing.assert_allclose(y[:, :, t], expected, **CLOSE)
    for name, tensor in state.items():
        np.testing.assert_allclose(new[name], tensor, err_msg=name, **CLOSE)


@lengths
def test_at_adapt_0_every_fast_weight_stays_bit_for_bit(length, ask):
    still, everyone = np.zeros((3, 2)), np.ones(3, bool)
    u, layer, state = start_of(config("self_modifying", 1, 5, 3), length)
    _, new = ask(worker.self_modifying, u, layer, state, still, everyone, config("self_modifying", 1, 5, 3))
    for name, tensor in new.items():
        np.testing.assert_array_equal(tensor, state[name].astype(np.float32))
    s, nothing = start_of(config("delta", 1, 5, 3), length)[2]["s"], np.zeros((3, 1, length))
    inputs = {"q": u[2], "k": u[0], "v": u[1], "eta": nothing, "log_alpha": nothing, "s": s}
    np.testing.assert_array_equal(ask(worker.delta, inputs, 64)[1], s.astype(np.float32))


def test_a_key_written_48_times_is_learnt_exactly(ask):
    key, gate = np.full((1, 1, 48, 5), 5**-0.5), np.full((1, 1, 48), 0.99)  # powers of T would reach 1e12 here
    inputs = {"q": key, "k": key, "v": key, "eta": gate, "log_alpha": 0 * gate, "s": np.zeros((1, 1, 5, 5))}
    y, s = ask(worker.delta, inputs, 64)
    np.testing.assert_allclose(y[0, 0, -1], key[0, 0, 0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(s[0, 0], np.outer(key[0, 0, 0], key[0, 0, 0]), rtol=0, atol=1e-6)


def test_a_stream_on_kernels_is_the_law_across_segments_and_promotions(ask):
    c = dataclasses.replace(TINY, memory_period=8, top_period=8, cms_periods=(8, 24), eta_max=0.2)
    start, adapt = dataclasses.replace(random_state(c, 2), position=np.array([6, 14])), np.array([[1, 1], [1, 0]])
    tokens = random_tokens(c, 2, 13)
    cuts = [0, 1, 2, 10, 11, 13]
    calls = [tokens[:, a:b] for a, b in itertools.pairwise(cuts)]
    logits, state = ask(worker.stream, random_params_of_all_heads(c), c, start, calls, adapt)
    expected, last = reference.run(random_params(c), c, tokens, start, adapt)
    np.testing.assert_allclose(logits, expected, **CLOSE)
    np.testing.assert_array_equal(state.position, last.position)
    for name, tensor in last.tensors.items():
        np.testing.assert_allclose(state.tensors[name], tensor, err_msg=name, **CLOSE)


def random_params_of_all_heads(c: HopeConfig):
    """Random parameters with a norm for each head, as a trained model has them."""
    params = dict(random_params(c))
    for i in range(c.n_layer):
        params[f"layers.{i}.head_norm"] = np.tile(params[f"layers.{i}.head_norm"], (c.n_head, 1))
    return params


class Device(SimpleNamespace):
    """What Triton asks a GPU's driver before it compiles."""

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A function that compiles for a GPU, in place of a launch, each kernel that a call would launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    launch, found = triton.runtime.JITFunction.run, []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def run(kernel, *arguments, grid, warmup, **options):
        found.append(launch(kernel, *arguments, grid=grid, warmup=True, **options))

    def compile_for(architecture, function, *arguments):
        device = Device(target=GPUTarget("cuda", architecture, 32))
        monkeypatch.setattr(triton.runtime.driver, "_active", device)
        monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
        function(*arguments)
        return found

    return compile_for


def spilled(cubin: bytes, folder: Path) -> int:
    """Bytes of stack that a thread of a compiled kernel needs."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


def call_memories(profile: str, length: int) -> None:
    """One call of a memory's kernels in the default shape, on numbers that are never looked at."""
    from fednl_runtime import kernels_triton

    c = HopeConfig(vocab_size=11, layers=(profile,))
    state = {n.removeprefix("0."): torch.zeros(2, *shape) for n, shape in state_shapes(c).items()}
    x, gate = torch.zeros(2, c.n_head, length, c.d_head), torch.zeros(2, c.n_head, length)
    if profile == "delta":
        kernels_triton.delta(x, x, x, gate, gate, state["s"], 64)
        return
    layer = worker.to_torch(random_layer(np.random.default_rng(0), c, profile))
    kernels_triton.self_modifying((x,) * 4, layer, state, torch.ones(2, 2), torch.ones(2, dtype=torch.bool), c)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("profile", "length"), [("delta", 1), ("delta", 16), ("self_modifying", 1), ("self_modifying", 16)]
)
def test_every_kernel_compiles_to_machine_code_and_that_of_one_token_spills_nothing(
    profile, length, architecture, compiled, tmp_path
):
    kernels = compiled(architecture, call_memories, profile, length)
    assert len(kernels) == (2 if (profile, length) == ("self_modifying", 16) else 1)
    for kernel in kernels:
        assert f".target sm_{architecture}" in kernel.asm["ptx"]
        assert length > 1 or spilled(kernel.asm["cubin"], tmp_path) == 0
