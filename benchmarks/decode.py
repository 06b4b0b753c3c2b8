"""Decode speed: the exported graph on onnxruntime against the same checkpoint's eager step in torch.

Both run one token at a time at batch 1 on one thread, in interleaved rounds of one process, each
carrying its own state; the figures are medians over rounds. Prefill is measured beside it. The last
line printed is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import torch

from fednl_runtime.export.checkpoint import load_checkpoint
from fednl_runtime.hope import Hope
from fednl_runtime.hope_step import step
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.state import MemoryState

ADAPT = np.ones((1, 2), np.float32)


def onnx_decoder(path: Path, tokens: np.ndarray, length: int) -> Callable[[], None]:
    """A function that feeds all tokens, `length` at a time."""
    backend = load(path, threads=1)
    stream = backend.open(MemoryState.zeros(backend.config))

    def run() -> None:
        for start in range(0, len(tokens), length):
            stream.feed(tokens[None, start : start + length], ADAPT)

    return run


def torch_decoder(checkpoint: Path, tokens: np.ndarray) -> Callable[[], None]:
    """A function that takes one eager step for each token."""
    config, params, _ = load_checkpoint(checkpoint)
    model = Hope(config)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    state = model.zeros()

    @torch.inference_mode()
    def run() -> None:
        nonlocal state
        for token in tokens:
            _, state = step(model, torch.tensor([token]), state)

    return run


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--model", "path", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--rounds", default=7, show_default=True)
@click.option("--tokens", "count", default=128, show_default=True, help="Tokens a round; a multiple of 16.")
def main(checkpoint: Path, path: Path | None, rounds: int, count: int) -> None:
    """Compare decode speeds of a model file and the CHECKPOINT it was exported from."""
    path = path or default_model_path()
    torch.set_num_threads(1)
    config = load_checkpoint(checkpoint)[0]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, count)
    arms = {
        "onnx_decode": onnx_decoder(path, tokens, 1),
        "torch_decode": torch_decoder(checkpoint, tokens),
        "onnx_prefill": onnx_decoder(path, tokens, 16),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, run in arms.items():
            elapsed = seconds(run)
            if number:  # the first round warms up
                times[name].append(elapsed)
    rates = {f"{name}_tokens_per_second": count / statistics.median(t) for name, t in times.items()}
    ratios = [b / a for a, b in zip(times["onnx_decode"], times["torch_decode"], strict=True)]
    versions = {name: version(name) for name in ("onnxruntime", "torch")}
    report = rates | {"onnx_over_torch": statistics.median(ratios), "threads": 1, "rounds": rounds} | versions
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
