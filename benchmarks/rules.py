"""The gradient graph against torch's autograd: largest relative error of every gradient, time, memory, sizes.

The state is random and nowhere zero, and the position 64 tokens before a boundary of all levels. Errors
are the largest difference over the largest magnitude of torch's gradient in float64; those of torch in
float32 stand beside them. The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch

from fednl_runtime.export.verify import file_parameters, random_state
from fednl_runtime.export.weights import rule_name
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.hope import Hope, to_tensors
from fednl_runtime.model_file import default_model_path
from fednl_runtime.rule_training import peak_rss
from fednl_runtime.rules import gradients_path
from fednl_runtime.state import MemoryState, Tensors, Tokens


def autograd(model: Hope, tokens: Tokens, state: MemoryState) -> Tensors:
    """torch's gradient of every rule for tokens `[T + 1]`."""
    dtype, ids = model.embedding.dtype, torch.tensor(tokens[None])
    past = {n: t if n == "position" else t.to(dtype) for n, t in to_tensors(state).items()}
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(ids[:, :-1], past)[0][0], ids[0, 1:]).backward()
    rules = {rule_name(name): parameter.grad for name, parameter in model.named_parameters()}
    return {name: g.numpy().copy() for name, g in rules.items() if name and g is not None}


def relative(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Largest difference over the largest magnitude, by rule."""
    return {n: float(np.abs(found[n] - w).max() / np.abs(w).max()) for n, w in wanted.items()}


def nodes(graph: onnx.GraphProto) -> int:
    """Number of nodes, those in loops included."""
    inside = (nodes(a.g) for node in graph.node for a in node.attribute if a.HasField("g"))
    return len(graph.node) + sum(inside)


def median_ms(work: Any, repeat: int) -> float:
    """Median time of some work in milliseconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--tokens", default=128, show_default=True, help="Tokens to back-propagate through.")
@click.option("--repeat", default=5, show_default=True, help="Steps to time.")
def main(model: Path | None, tokens: int, repeat: int) -> None:
    """Compare the gradient graph of a model file with torch, one thread each."""
    torch.set_num_threads(1)
    path = model or default_model_path()
    start, before = time.perf_counter(), peak_rss()
    graph = load_gradients(path, 1)
    load_s = time.perf_counter() - start
    rng = np.random.default_rng(0)
    every = int(np.lcm.reduce((*graph.config.cms_periods, graph.config.memory_period, graph.config.top_period)))
    state = random_state(rng, graph.config, np.array([every - 64]))
    ids = rng.integers(0, graph.config.vocab_size, tokens + 1)
    _, found, _ = graph.step(graph.defaults.tensors, ids, state)
    step_ms = median_ms(lambda: graph.step(graph.defaults.tensors, ids, state), repeat)
    own_rss = peak_rss() - before
    single = Hope(graph.config)
    single.load_state_dict({name: torch.tensor(value) for name, value in file_parameters(path).items()})
    in_torch = autograd(single, ids, state)
    torch_ms = median_ms(lambda: autograd(single, ids, state), repeat)
    wanted = autograd(single.double(), ids, state)
    errors, of_torch = relative(found, wanted), relative(in_torch, wanted)
    for name, error in errors.items():
        click.echo(f"{name:22} {error:.1e}   torch in float32 {of_torch[name]:.1e}")
    graph_file = gradients_path(path)
    report = {
        "tokens": tokens,
        "largest_error": max(errors.values()),
        "largest_error_of_torch_float32": max(of_torch.values()),
        "load_s": load_s,
        "ms_per_step": step_ms,
        "torch_ms_per_step": torch_ms,
        "nodes": nodes(onnx.load(graph_file, load_external_data=False).graph),
        "file_bytes": graph_file.stat().st_size,
        "model_file_bytes": path.stat().st_size,
        "rss_bytes": own_rss,
        "errors": errors,
    }
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
