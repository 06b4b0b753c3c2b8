"""The torch backend on a GPU: tokens a second by batch, and how much of the memory's bandwidth the kernels reach.

Before anything is timed, the device must give the logits and the state that the CPU gives. Weights are random, of the
default shape; times are medians over rounds. A kernel's traffic is what it cannot avoid (running weights read and
written, boundary weights read once), set against a plain copy measured in the same run. The last line is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import click
import numpy as np
import torch

from fednl_runtime.config import HopeConfig
from fednl_runtime.hope import Hope, parameters
from fednl_runtime.state import MemoryState, state_shapes
from fednl_runtime.torch_backend import TorchBackend

CONFIG = HopeConfig(4096)
BOUND = 1e-3
"""Largest difference of a logit or a state between the device and the CPU."""

COPY = 1 << 28
"""Bytes of the copy that bandwidth is measured with."""


def largest_difference(backend: TorchBackend, law: TorchBackend) -> float:
    """How far two backends are apart after calls of 16, 1 and 15 tokens in three rows."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 32))
    streams, adapt, apart = [b.open(MemoryState.zeros(CONFIG, 3)) for b in (backend, law)], np.ones((3, 2)), []
    for piece in (slice(16), slice(16, 17), slice(17, 32)):
        one, other = (stream.feed(tokens[:, piece], adapt) for stream in streams)
        apart.append(float(np.abs(one - other).max()))
    states = [stream.snapshot().tensors for stream in streams]
    return max(*apart, *(float(np.abs(states[0][n] - states[1][n]).max()) for n in states[0]))


def tokens_per_second(backend: TorchBackend, batch: int, length: int, rounds: int) -> float:
    """Median rate of calls of `length` tokens in `batch` rows; the logits come back to the CPU, as in a server."""
    stream, adapt, times = backend.open(MemoryState.zeros(CONFIG, batch)), np.ones((batch, 2)), []
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (batch, backend.segment))
    for _ in range(rounds + 2):  # the first two compile and warm up
        began = time.perf_counter()
        for start in range(0, backend.segment, length):
            stream.feed(tokens[:, start : start + length], adapt)
        times.append(time.perf_counter() - began)
    return batch * backend.segment / statistics.median(times[2:])


def memory_call(profile: str, batch: int) -> tuple[Callable[[], object], int]:
    """A one-token call of a memory's kernel on the GPU, and the bytes of state that it must move."""
    from fednl_runtime import kernels_triton

    c = HopeConfig(4096, layers=(profile,))
    shapes = {n.removeprefix("0."): shape for n, shape in state_shapes(c).items()}
    state = {n: torch.zeros(batch, *shape, device="cuda") for n, shape in shapes.items()}
    x = torch.nn.functional.normalize(torch.randn(4, batch, c.n_head, 1, c.d_head, device="cuda"), dim=-1)
    if profile == "delta":
        gate, s = torch.rand(batch, c.n_head, 1, device="cuda"), state["s"]
        return lambda: kernels_triton.delta(x[2], x[0], x[1], gate, -gate, s, 64), 2 * s.nbytes
    block = Hope(c).cuda().layers[0].tensors()
    layer, u, adapt = {n: t.detach() for n, t in block.items()}, x.unbind(0), torch.ones(batch, 2, device="cuda")
    closing = torch.zeros(batch, dtype=torch.bool, device="cuda")
    moved = 3 * (state["w1"].nbytes + state["w2"].nbytes)
    return lambda: kernels_triton.self_modifying(u, layer, state, adapt, closing, c), moved


def bandwidth(batches: list[int]) -> dict[str, float]:
    """Bytes a second of a copy, and the share of it that each memory's one-token kernel reaches at each batch."""
    from triton.testing import do_bench

    source = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    copied = 2 * COPY / (do_bench(source.clone, return_mode="median") / 1e3)
    found = {"copy_bytes_per_second": copied}
    for profile in ("delta", "self_modifying"):
        for batch in batches:
            call, moved = memory_call(profile, batch)
            found[f"{profile}_{batch}"] = moved / (do_bench(call, return_mode="median") / 1e3) / copied
    return found


@click.command()
@click.option("--device", default="cuda", show_default=True, help="A torch device; `cpu` times the eager operators.")
@click.option("--batches", default="1,8,64", show_default=True, help="Rows of a call.")
@click.option("--rounds", default=7, show_default=True)
def main(device: str, batches: str, rounds: int) -> None:
    """Compare with the CPU, then time decode, prefill and the kernels."""
    torch.manual_seed(0)
    params, sizes = parameters(Hope(CONFIG)), [int(size) for size in batches.split(",")]
    backend = TorchBackend(CONFIG, params, "random", device)
    apart = largest_difference(backend, TorchBackend(CONFIG, params, "random"))
    click.echo(f"largest difference from the CPU: {apart:.1e}")
    if not apart <= BOUND:
        sys.exit(f"The device computes something else (bound {BOUND}); nothing is timed.")
    report: dict[str, object] = {
        "device": device,
        "largest_difference": apart,
        "rounds": rounds,
        "torch": version("torch"),
    }
    for size in sizes:
        report[f"decode_{size}"] = tokens_per_second(backend, size, 1, rounds)
        report[f"prefill_{size}"] = tokens_per_second(backend, size, backend.segment, rounds)
    if device.startswith("cuda"):
        report |= {"gpu": torch.cuda.get_device_name(), "triton": version("triton"), "share_of_copy": bandwidth(sizes)}
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
