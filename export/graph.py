"""A Hope model as one ONNX file, built from operators: no tracing, any number of tokens."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, save_model
from onnx.external_data_helper import set_external_data

from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.export import blocks
from fednl_runtime.export.boundary import close_chunks, slow_names
from fednl_runtime.export.ops import MICROSOFT, Ops, typed
from fednl_runtime.export.weights import Weights, fingerprint, stored
from fednl_runtime.model_file import data_path
from fednl_runtime.state import state_shapes

FORMAT = 1
"""Version of the layout of the file; a runtime refuses a higher one."""

OPSET, IR = 23, 11
MIN_ONNXRUNTIME = "1.32.0"
LARGEST = 2_000_000_000
"""Bytes of weights that one file holds. Protobuf, and so ONNX, ends at 2 GiB; above it weights lie in a second file."""

Params = Mapping[str, npt.NDArray[np.floating]]


def export_model(
    params: Params,
    config: HopeConfig,
    tokenizer_json: str,
    path: str | Path,
    ops: Ops | None = None,
    name: str = "hope",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `params` (named as in `reference.step`) as one self-contained model file; above 2 GB as two.

    `ops` say which operators it is made of, by default the fused ones. `metadata` is kept beside our own.
    """
    ops = ops or Ops(portable=False)
    model = build_model(params, config, ops)
    own = {"fednl.name": name, "fednl.tokenizer": tokenizer_json, **describe(params, config, ops.portable, model)}
    helper.set_model_props(model, {**(metadata or {}), **own})
    write(model, Path(path))


def write(model: ModelProto, path: Path) -> None:
    """Write a model's file, and beyond `LARGEST` its weights next to it, as `model.onnx.data`."""
    data = data_path(path)
    data.unlink(missing_ok=True)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST:
        for tensor in model.graph.initializer:
            if not tensor.name.startswith("const."):
                set_external_data(tensor, location=data.name)
    save_model(model, path)


def in_place(c: HopeConfig, portable: bool) -> list[str]:
    """State tensors that a call may write where it reads them: nothing reads them after the write.

    Slow tensors are written by the last node of a branch; fused recurrences update in place, after the
    branches have read their states. One CMS level alone does not order its statistics after the branch.
    """
    recurrent = ("s", "w1", "w2", *("cms_a", "cms_g") * (c.n_cms > 1))
    names = slow_names(c) + ["top.f"] * bool(c.top_rank)
    return names + [n for n in state_shapes(c) if n.rpartition(".")[2] in recurrent] * (not portable)


def describe(params: Params, c: HopeConfig, portable: bool, model: ModelProto) -> dict[str, str]:
    """What the runtime needs to know of a file, as its metadata."""
    operators = collections.Counter(node.op_type for node in model.graph.node)
    rules = {n: v.shape for n, v in stored(params).items() if n.startswith("rule.")}
    return {
        "fednl.format": str(FORMAT),
        "fednl.config": c.to_json(),
        "fednl.state": json.dumps(state_shapes(c)),
        "fednl.in_place": json.dumps(in_place(c, portable)),
        "fednl.rules": json.dumps(rules),
        "fednl.segment": str(c.segment),
        "fednl.parameters": str(sum(int(np.size(v)) for v in params.values())),
        "fednl.operators": json.dumps(operators),
        "fednl.portable": json.dumps(portable),
        "fednl.min_onnxruntime": MIN_ONNXRUNTIME,
        "fednl.fingerprint": fingerprint(params, c),
    }


def build_model(params: Params, c: HopeConfig, ops: Ops) -> ModelProto:
    """The graph of one call: input_ids `[B, T]`, state and rules in; logits `[B, T, V]` and state out."""
    weights = stored(params)
    add_weights(ops, c, weights)
    embedding = np.asarray(params["embedding"], np.float64)
    power = float(np.sum(embedding**2)) / len(embedding)
    close_chunks(ops, c, power)
    add_layers(ops, c)
    state = state_shapes(c)
    rules = [n for n in weights if n.startswith("rule.")]
    graph = helper.make_graph(
        ops.nodes,
        "hope",
        [
            typed("input_ids", ("B", "T"), TensorProto.INT64),
            typed("position", ("B",), TensorProto.INT64),
            typed("adapt", ("B", 2)),
            *(typed(f"past.{n}", ("B", *shape)) for n, shape in state.items()),
            *(typed(n, weights[n].shape) for n in rules),
        ],
        [
            typed("logits", ("B", "T", c.vocab_size)),
            *(typed(f"present.{n}", ("B", *shape)) for n, shape in state.items()),
        ],
        initializer=list(ops.initializers.values()),
    )
    opsets = [helper.make_opsetid("", OPSET)] + [helper.make_opsetid(MICROSOFT, 1)] * (not ops.portable)
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="fednl-runtime")


def add_weights(ops: Ops, c: HopeConfig, weights: Weights) -> None:
    """Store every weight; the value that nodes read is `{name}:f32`, a rule's is its own name."""
    for name, value in weights.items():
        ops.weight(name, value, rule=name.startswith("rule."))
    for i, profile in enumerate(c.layers):
        for name in ("w1", "w2") if profile == "self_modifying" else ():
            split_memories(ops, c, f"layers.{i}.{name}_init", weights[f"layers.{i}.{name}_init"].shape[1:])


def split_memories(ops: Ops, c: HopeConfig, name: str, shape: tuple[int, ...]) -> None:
    """Views of stacked initial weights: `:heads [5, H, K, V]`, and `:mem [H, K, V]` of the last memory."""
    full = (len(MEMORIES), c.n_head, *shape)
    stacked = ops("Reshape", f"{name}:f32", ops.ints(*full), out=f"{name}:heads")
    ops("Gather", stacked, ops.const(len(MEMORIES) - 1, np.int64), axis=0, out=f"{name}:mem")


def add_layers(ops: Ops, c: HopeConfig) -> None:
    """All nodes from the tokens to the logits."""
    ops.unembed(add_hidden(ops, c), "logits")


def add_hidden(ops: Ops, c: HopeConfig) -> str:
    """All nodes from the tokens to the hidden state `[B, T, d]` that the logits are read from."""
    call = blocks.prepare(ops, c)
    x, added = ops.embed("input_ids"), ""
    for i in range(c.n_layer):
        normed, x = add_norm(ops, c, x, added, f"layers.{i}.norm:f32")
        added = blocks.mixer(ops, c, call, i, normed)
        if c.n_cms:
            x, added = blocks.cms(ops, c, call, i, x, added)
    h, _ = add_norm(ops, c, x, added, "norm:f32")
    return blocks.top(ops, c, call, h) if c.top_rank else h


def add_norm(ops: Ops, c: HopeConfig, x: str, added: str, gain: str) -> tuple[str, str]:
    """RMSNorm of x plus what is still to be added, and that sum."""
    return ops.add_rms(x, added, gain, c.norm_eps) if added else (ops.rms(x, gain, c.norm_eps), x)
