"""What learning costs: decode of a model's graph against the same graph with every update of a memory taken out.

The other graph reads its memories and writes none: recurrences become reads, boundaries and their
statistics are cut off with all that only they need. Both decode one token at a time at batch 1, in
interleaved rounds of one process. The last line printed is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from fednl_runtime.model_file import ModelFile, default_model_path
from fednl_runtime.onnx_backend import bound, load, open_session, session_options
from fednl_runtime.speed import one_by_one, spread_out
from fednl_runtime.stopwatch import interleaved


def without_updates(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """The graph for calls of one token that leaves the memory as it is; `shapes` are those of the state."""
    still = onnx.ModelProto()
    still.CopyFrom(model)
    graph = still.graph
    nodes = [part for node in graph.node for part in as_read(node, graph, shapes)]
    for node in nodes:
        node.input[:] = [past(name, shapes) for name in node.input]
    kept = needed(nodes, "logits")
    names = {name for node in kept for name in node.input}
    for field, items in (
        ("node", kept),
        ("output", [value for value in graph.output if value.name == "logits"]),
        ("input", [value for value in graph.input if value.name in names]),
        ("initializer", [tensor for tensor in graph.initializer if tensor.name in names]),
    ):
        chosen = [type(item).FromString(item.SerializeToString()) for item in items]
        graph.ClearField(field)
        getattr(graph, field).extend(chosen)
    return still


def past(name: str, shapes: dict[str, tuple[int, ...]]) -> str:
    """The value that stands for `name` where nothing is updated."""
    state = name.removeprefix("present.")
    return f"past.{state}" if state != name and state in shapes else name


def as_read(node: onnx.NodeProto, graph: onnx.GraphProto, shapes: dict[str, tuple[int, ...]]) -> list[onnx.NodeProto]:
    """A recurrence as a read of its memory, q S for each head; any other node as it is."""
    if node.op_type != "LinearAttention":
        return [node]
    query, memory, out = node.input[0], node.input[3], node.output[0]
    heads, rows, columns = shapes[memory.removeprefix("past.")]
    wanted = {f"{out}:heads": (0, heads, 1, rows), f"{out}:flat": (0, 1, heads * columns)}
    graph.initializer.extend(numpy_helper.from_array(np.array(shape), name) for name, shape in wanted.items())
    return [
        helper.make_node("Reshape", [query, f"{out}:heads"], [f"{out}:query"]),
        helper.make_node("MatMul", [f"{out}:query", memory], [f"{out}:read"]),
        helper.make_node("Reshape", [f"{out}:read", f"{out}:flat"], [out]),
    ]


def needed(nodes: list[onnx.NodeProto], wanted: str) -> list[onnx.NodeProto]:
    """Those nodes that `wanted` depends on, in their order."""
    names, kept = {wanted}, list[onnx.NodeProto]()
    for node in reversed(nodes):
        if names & set(node.output):
            kept.append(node)
            names |= set(node.input)
    return kept[::-1]


def still_decoder(session: ort.InferenceSession, model: ModelFile, steps: int) -> Callable[[], None]:
    """A function that reads `steps` tokens with a graph of `without_updates`."""
    inputs = {
        "input_ids": np.zeros((1, 1), np.int64),
        "position": np.ones(1, np.int64),
        "adapt": np.ones((1, 2), np.float32),
        **{f"past.{name}": np.zeros((1, *shape), np.float32) for name, shape in model.state.items()},
    }
    logits = {"logits": np.empty((1, 1, model.config.vocab_size), np.float32)}
    used = {value.name for value in session.get_inputs()}
    binding = bound(session, {name: value for name, value in inputs.items() if name in used}, logits)

    def work() -> None:
        for _ in range(steps):
            session.run_with_iobinding(binding)
        assert np.isfinite(logits["logits"]).all(), "a random model's logits are finite"

    work.buffers = inputs  # type: ignore[attr-defined]  # the binding does not keep them
    return work


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path), required=False)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--steps", default=64, show_default=True, help="Tokens a round.")
def main(path: Path | None, threads: int, rounds: int, steps: int) -> None:
    """Compare a model file, by default the shipped one, with itself without updates."""
    path = path or default_model_path()
    backend = load(path, threads)
    with tempfile.TemporaryDirectory() as folder:
        still = Path(folder) / "still.onnx"
        onnx.save(without_updates(onnx.load(path), backend.model.state), still)
        session = open_session(still, session_options(threads))
    works = {
        "learning": one_by_one(spread_out(backend, 1), 1, steps),
        "without_updates": still_decoder(session, backend.model, steps),
    }
    found = {name: timing.each(steps) for name, timing in interleaved(works, rounds).items()}
    learning, other = found["learning"], found["without_updates"]
    report = {
        "model": path.name,
        "seconds_a_token": {name: dataclasses.asdict(timing) for name, timing in found.items()},
        "cost_percent": 100 * (learning.median / other.median - 1),
        "cost_percent_cpu": 100 * (learning.cpu / other.cpu - 1),
        "threads": threads,
        "rounds": rounds,
        "onnxruntime": version("onnxruntime"),
    }
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
