"""Work at chunk boundaries: one branch that closes chunks, taken only when a row reaches one."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.ops import Ops, typed


def slow_names(c: HopeConfig) -> list[str]:
    """State tensors that change only at chunk boundaries."""
    names = []
    for i, profile in enumerate(c.layers):
        names += [f"{i}.w1_boundary", f"{i}.w2_boundary"] * (profile == "self_modifying")
        names += [f"{i}.cms_f"] * bool(c.n_cms)
    return names + ["top.f"] * bool(c.top_rank)


def close_chunks(ops: Ops, c: HopeConfig, segment: int, power: float, embedding: str) -> None:
    """Write every `present.` slow tensor: stepped in rows that reach a boundary, else as it was.

    `power` is rms(|E|)^2 of the embedding E `[V, d]`, whose graph value is `embedding`.
    """
    names = slow_names(c)
    if not names:
        return
    at = ops("Cast", at_multiple(ops, "position", (segment,)), to=TensorProto.INT32)
    reached = ops("Cast", ops("ReduceMax", at, keepdims=0), to=TensorProto.BOOL)
    closing, idle = ops.branch(), ops.branch()
    results = closed(closing, c, power, embedding)
    branches = {}
    for key, branch, values in (("then_branch", closing, results), ("else_branch", idle, {})):
        found = [values[n] if values else branch("Identity", f"past.{n}") for n in names]
        branches[key] = branch.graph(key, [], [typed(v) for v in found])
    ops.many("If", reached, outputs=[f"present.{n}" for n in names], **branches)


def at_multiple(ops: Ops, position: str, periods: tuple[int, ...]) -> str:
    """Whether each position `[..., 1]` or `[B]` is a multiple of each period."""
    return ops("Equal", ops("Mod", position, ops.ints(*periods)), ops.ints(0))


def closed(ops: Ops, c: HopeConfig, power: float, embedding: str) -> dict[str, str]:
    """New value of every slow tensor, by state name."""
    position = ops("Unsqueeze", "position", ops.ints(1))
    token, slow = ops.split("adapt", (1, 1), 1)
    writes, learns = (ops("Greater", a, ops.const(0)) for a in (token, slow))
    results: dict[str, str] = {}
    cms, promoted = "", ""
    if c.n_cms:
        cms = ops.reshape(ops("And", at_multiple(ops, position, c.cms_periods), learns), 0, c.n_cms, 1, 1)
    if "self_modifying" in c.layers:
        promoted = ops.reshape(ops("And", at_multiple(ops, position, (c.memory_period,)), writes), 0, 1, 1, 1)
    for i, profile in enumerate(c.layers):
        if profile == "self_modifying":
            for name in (f"{i}.w1", f"{i}.w2"):
                results[f"{name}_boundary"] = ops("Where", promoted, f"past.{name}", f"past.{name}_boundary")
        if c.n_cms:
            results[f"{i}.cms_f"] = close_cms(ops, c, i, cms, ops.reshape(slow, 0, 1, 1, 1))
    if c.top_rank:
        now = ops.reshape(ops("And", at_multiple(ops, position, (c.top_period,)), learns), 0, 1, 1)
        results["top.f"] = close_top(ops, c, now, ops.reshape(slow, 0, 1, 1), power, embedding)
    return results


def decayed(ops: Ops, f: str, slow: str, logit: str, shape: tuple[int, ...]) -> str:
    """F + slow (sigmoid(logit) - 1) F."""
    loss = ops("Sub", ops.reshape(ops("Sigmoid", logit), *shape), ops.const(1))
    return ops("Add", f, ops("Mul", ops("Mul", slow, loss), f))


def close_cms(ops: Ops, c: HopeConfig, layer: int, closing: str, slow: str) -> str:
    """F <- lambda F + (eps / C)(A - G F) for the levels and rows marked in `closing [B, k, 1, 1]`."""
    f, a, g = (f"past.{layer}.cms_{n}" for n in "fag")
    eps = ops("Mul", ops("Sigmoid", f"rule.{layer}.cms_step"), ops.const(1 / np.array(c.cms_periods)))
    gradient = ops("Mul", ops.reshape(eps, c.n_cms, 1, 1), ops("Sub", a, ops("MatMul", g, f)))
    shrunk = decayed(ops, f, slow, f"rule.{layer}.cms_decay", (c.n_cms, 1, 1))
    return ops("Where", closing, ops("Add", shrunk, gradient), f)


def close_top(ops: Ops, c: HopeConfig, closing: str, slow: str, power: float, embedding: str) -> str:
    """F <- lambda F - eps / power * sum_t p_t g_t^T with the pending chunk's exact gradients g, |F| bounded."""
    first = ops("Slice", "input_ids", ops.ints(0), ops.ints(1), ops.ints(1))
    known = ops("Slice", "past.top.token", ops.ints(1), ops.ints(c.top_period), ops.ints(1))
    targets = ops("Concat", ops("Cast", known, to=TensorProto.INT64), first, axis=1)
    guess = ops("Softmax", ops.product("past.top.h", embedding, 2, trans_y=True), axis=-1)
    g = ops("Sub", ops("MatMul", guess, embedding), ops("Gather", embedding, targets))
    eps = ops("Mul", ops("Sigmoid", "rule.top.step"), ops.const(2 / power))
    gradient = ops("Mul", eps, ops.product("past.top.p", g, 3, trans_x=True))
    stepped = ops("Sub", decayed(ops, "past.top.f", slow, "rule.top.decay", (1,)), gradient)
    square = ops("ReduceSumSquare", stepped, ops.ints(1, 2), keepdims=1)
    norm = ops("Sqrt", ops("Add", square, ops.const(1e-12)))
    scale = ops("Min", ops.const(1), ops("Div", ops.const(c.norm_cap / np.sqrt(power)), norm))
    return ops("Where", closing, ops("Mul", stepped, scale), "past.top.f")
