"""The gradient graph: loss and exact gradient of every rule over T tokens, by a loop over segments and a loop back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, save_model
from onnx.shape_inference import infer_shapes

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.autodiff import backward, needed
from fednl_runtime.export.boundary import close_blocks, pending_gradient, slow_names, step_top
from fednl_runtime.export.graph import IR, OPSET, Params, add_hidden, add_weights
from fednl_runtime.export.ops import Ops, typed
from fednl_runtime.export.pullbacks import Shape
from fednl_runtime.export.segment_ops import SegmentOps
from fednl_runtime.export.weights import fingerprint, stored
from fednl_runtime.model_file import read_weights
from fednl_runtime.rules import WEIGHTS, gradients_path, schema_hash
from fednl_runtime.state import state_shapes

SHARED_BYTES = 1024
"""Weights of at least so many bytes are read from the model file instead of stored again."""

KEPT = ("top.h", "top.token")
"""State tensors through which no gradient passes."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One segment as nodes: the hidden state that is read, and every `present.` tensor, from every `past.` one."""

    nodes: list[NodeProto]
    read: str
    inputs: dict[str, Shape]
    """Floating inputs: the state, and the pending gradients of the top level as `past.top.g`."""


def state_with_gradients(c: HopeConfig) -> dict[str, Shape]:
    """The state of one session as the loops carry it: with the top level's pending gradients."""
    shapes = {name: (1, *shape) for name, shape in state_shapes(c).items()}
    return shapes | ({"top.g": (1, c.top_period, c.d_model)} if c.top_rank else {})


def add_segment(ops: SegmentOps, c: HopeConfig, power: float) -> Segment:
    """Close what the position closes, then read one segment: input_ids `[1, S]`, position `[1]`."""
    for name, value in zip(slow_names(c), close_blocks(ops, c), strict=True):
        ops("Identity", value, out=f"present.{name}")
    if c.top_rank:
        ops("Identity", step_top(ops, c, power, "past.top.g"), out="present.top.f")
    read = add_hidden(ops, c)
    return Segment(ops.nodes, read, {f"past.{name}": shape for name, shape in state_with_gradients(c).items()})


def shapes_of(outer: Ops, segment: Segment, c: HopeConfig, rules: Mapping[str, Shape]) -> dict[str, Shape]:
    """The static shape of every value of a segment."""
    inputs = [typed(name, shape) for name, shape in {**segment.inputs, **rules}.items()]
    inputs += [typed("position", (1,), TensorProto.INT64), typed("input_ids", (1, c.segment), TensorProto.INT64)]
    nodes, initializers = [*outer.nodes, *segment.nodes], list(outer.initializers.values())
    graph = helper.make_graph(nodes, "segment", inputs, [typed(segment.read)], initializer=initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    found = infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes = {t.name: tuple(t.dims) for t in initializers} | dict(rules)
    for value in (*found.input, *found.value_info, *found.output):
        dims = value.type.tensor_type.shape.dim
        if all(d.HasField("dim_value") for d in dims):  # positions are counted at run time, but need no gradient
            shapes[value.name] = tuple(d.dim_value for d in dims)
    return shapes


def body(name: str, ops: Ops, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
    """Nodes as the body of a loop: what they make and take gets the loop's name in front, so that no name is twice."""
    nodes = needed(ops.nodes, [value.name for value in outputs])
    local = {value.name for value in inputs} | {out for node in nodes for out in node.output}
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [f"{name}/{n}" if n in local else n for n in names]
    for value in (*inputs, *outputs):
        value.name = f"{name}/{value.name}"
    return helper.make_graph(nodes, name, inputs, outputs)


def reading(outer: SegmentOps, c: HopeConfig, power: float) -> tuple[GraphProto, list[str]]:
    """The loop forward: from a state to the next, the summed loss, and what the way back needs of each segment.

    What it stacks: the state a segment starts from (named in the second result), and the loss's gradient at `read`.
    """
    ops = outer.branch()
    segment = add_segment(ops, c, power)
    guess = ops("LogSoftmax", ops.product(segment.read, "embedding:f32", 2, trans_y=True), axis=-1)
    picked = ops("GatherElements", guess, ops("Unsqueeze", "targets", ops.ints(2)), axis=2)
    ops("Sub", "loss_before", ops("ReduceSum", picked, keepdims=0), out="loss")
    expected = ops("MatMul", ops("Exp", guess), "embedding:f32")
    ops("Sub", expected, ops("Gather", "embedding:f32", "targets"), out="g")
    state = state_with_gradients(c)
    if c.top_rank:
        ops.tail(ops("Concat", "past.top.g", "g", axis=1), c.top_period, 1, "present.top.g")
    starts = [name for name in state if name not in KEPT]
    for name in starts:
        ops("Identity", f"past.{name}", out=f"start.{name}")
    inputs = [typed("loss_before", ()), *(typed(f"past.{n}", shape) for n, shape in state.items())]
    whole = [typed(n, (1, c.segment), TensorProto.INT64) for n in ("input_ids", "targets")]
    inputs += [*whole, typed("position", (1,), TensorProto.INT64)]
    outputs = [typed("loss", ()), *(typed(f"present.{n}", shape) for n, shape in state.items())]
    outputs += [*(typed(f"start.{n}", state[n]) for n in starts), typed("g", (1, c.segment, c.d_model))]
    return body("read", ops, inputs, outputs), starts


def going_back(
    outer: SegmentOps, c: HopeConfig, power: float, starts: list[str], rules: Mapping[str, Shape]
) -> GraphProto:
    """The loop back: reads a segment again, and turns gradients of its `present.` into those of its `past.`.

    Carries the gradients of the state and the sums of the rules' gradients.
    """
    ops = outer.branch()
    segment = add_segment(ops, c, power)
    shapes = shapes_of(outer, segment, c, rules)
    state = state_with_gradients(c)
    carried = [name for name in starts if name != "top.g"]
    seeds = {f"present.{name}": f"after.{name}" for name in carried} | {segment.read: "g"}
    wanted = [*(f"past.{name}" for name in carried), *rules]
    found = backward(ops, list(segment.nodes), shapes, seeds, wanted)
    for name in carried:
        gradient = found[f"past.{name}"] or ops("Mul", f"after.{name}", ops.const(0))
        ops("Identity", gradient, out=f"before.{name}")
    for name in rules:
        ops("Add", f"sum.{name}", found[name] or ops.const(0), out=f"gradient.{name}")
    inputs = [typed(f"after.{n}", state[n]) for n in carried] + [typed(f"sum.{n}", s) for n, s in rules.items()]
    inputs += [typed(f"past.{n}", state[n]) for n in starts] + [typed("g", (1, c.segment, c.d_model))]
    inputs += [typed("input_ids", (1, c.segment), TensorProto.INT64), typed("position", (1,), TensorProto.INT64)]
    outputs = [typed(f"before.{n}", state[n]) for n in carried] + [typed(f"gradient.{n}", s) for n, s in rules.items()]
    return body("back", ops, inputs, outputs)


def build_rules_model(params: Params, c: HopeConfig) -> ModelProto:
    """The graph of one window: tokens `[1, T + 1]`, T a multiple of the segment, from a position that is one too.

    Takes `position [1]`, `past.*` and every rule; gives the mean loss, `gradient.rule.*` and `present.*`.
    """
    ops, weights = SegmentOps(c.segment), stored(params)
    rules = {name: value.shape for name, value in weights.items() if name.startswith("rule.")}
    add_weights(ops, c, weights)
    ops.initializers["adapt"] = numpy_helper.from_array(np.ones((1, 2), np.float32), "adapt")
    embedding = np.asarray(params["embedding"], np.float64)
    power = float(np.sum(embedding**2)) / len(embedding)
    read, starts = reading(ops, c, power)
    back = going_back(ops, c, power, starts, rules)
    for name in rules:
        del ops.initializers[name]
    add_loops(ops, c, read, back, starts, rules)
    state = {name: (1, *shape) for name, shape in state_shapes(c).items()}
    graph = helper.make_graph(
        ops.nodes,
        "rules",
        [
            typed("tokens", (1, "T + 1"), TensorProto.INT64),
            typed("position", (1,), TensorProto.INT64),
            *(typed(f"past.{n}", shape) for n, shape in state.items()),
            *(typed(n, shape) for n, shape in rules.items()),
        ],
        [
            typed("loss", ()),
            *(typed(f"gradient.{n}", shape) for n, shape in rules.items()),
            *(typed(f"present.{n}", shape) for n, shape in state.items()),
        ],
        initializer=list(ops.initializers.values()),
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="fednl-runtime"
    )


def add_loops(
    ops: SegmentOps, c: HopeConfig, read: GraphProto, back: GraphProto, starts: list[str], rules: Mapping[str, Shape]
) -> None:
    """The nodes around the two loops: tokens cut into segments, zero gradients to begin with, the mean."""
    ids, targets, positions, length = cut_tokens(ops, c)
    state = state_with_gradients(c)
    if c.top_rank:
        first = ops("Slice", "tokens", ops.ints(0), ops.ints(1), ops.ints(1))
        ops("Identity", pending_gradient(ops, c, first), out="past.top.g")
    outputs = ["loss_sum", *(f"present.{n}" for n in state), *(f"starts.{n}" for n in starts), "errors"]
    ops.many(
        "Scan", ops.const(0), *(f"past.{n}" for n in state), ids, targets, positions,
        outputs=outputs, body=read, num_scan_inputs=3,
    )  # fmt: skip
    ops("Div", "loss_sum", length, out="loss")
    errors = ops("Div", "errors", length)
    carried = [name for name in starts if name != "top.g"]
    zeros = [ops("Expand", ops.const(0), ops.ints(*shape)) for shape in (*(state[n] for n in carried), *rules.values())]
    stacked = [*(f"starts.{n}" for n in starts), errors, ids, positions]
    gradients = [f"gradient.{name}" for name in (*(f"past.{n}" for n in carried), *rules)]
    ops.many(
        "Scan", *zeros, *stacked, outputs=gradients, body=back, num_scan_inputs=len(stacked),
        scan_input_directions=[1] * len(stacked),
    )  # fmt: skip


def cut_tokens(ops: Ops, c: HopeConfig) -> tuple[str, str, str, str]:
    """Token ids and targets `[n, 1, S]`, positions `[n, 1]` of the segments, and T as a float."""
    size, end = c.segment, ops.ints(np.iinfo(np.int64).max)
    ids = ops("Slice", "tokens", ops.ints(0), ops.ints(-1), ops.ints(1))
    targets = ops("Slice", "tokens", ops.ints(1), end, ops.ints(1))
    ids, targets = (ops.reshape(x, -1, 1, size) for x in (ids, targets))
    count = ops("Squeeze", ops("Shape", ids, start=0, end=1), ops.ints(0))
    steps = ops("Mul", ops("Range", ops.const(0, np.int64), count, ops.const(1, np.int64)), ops.const(size, np.int64))
    positions = ops("Add", ops("Unsqueeze", steps, ops.ints(1)), "position")
    length = ops("Cast", ops("Mul", count, ops.const(size, np.int64)), to=TensorProto.FLOAT)
    return ids, targets, positions, length


def export_rules(params: Params, c: HopeConfig, model_path: Path) -> Path:
    """Write the gradient graph next to the model file of the same `params`, whose weights it shares.

    The file holds the graph and where in the model file each weight is; loaded with any other file it is refused.
    """
    data = read_weights(model_path)
    model = build_rules_model(params, c)
    for tensor in model.graph.initializer:
        share(tensor, data)
    rules = {name: value for name, value in stored(params).items() if name.startswith("rule.")}
    own = {
        "fednl.rules_format": "1",
        "fednl.config": c.to_json(),
        "fednl.segment": str(c.segment),
        "fednl.rules": json.dumps({name: value.shape for name, value in rules.items()}),
        "fednl.defaults": json.dumps({name: data.index(value.tobytes()) for name, value in rules.items()}),
        "fednl.fingerprint": fingerprint(params, c),
        "fednl.schema": schema_hash({name: value.shape for name, value in rules.items()}, fingerprint(params, c)),
        "fednl.model_sha256": hashlib.sha256(data).hexdigest(),
    }
    helper.set_model_props(model, own)
    path = gradients_path(model_path)
    save_model(model, path)
    return path


def share(tensor: TensorProto, data: bytes) -> None:
    """Replace the bytes of a large weight by their place in the model file's `data`, where they are."""
    place = data.find(tensor.raw_data) if len(tensor.raw_data) >= SHARED_BYTES else -1
    if place >= 0:
        entries = {"location": WEIGHTS, "offset": str(place), "length": str(len(tensor.raw_data))}
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
