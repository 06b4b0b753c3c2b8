"""Work at chunk boundaries: branches that close chunks, taken only when a row reaches one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.ops import Ops, typed

PER_ROW = ("position", "adapt", "input_ids")
"""Inputs of the graph with an axis of rows, besides the state."""


def slow_names(c: HopeConfig) -> list[str]:
    """State tensors of the blocks that change only at chunk boundaries."""
    names = []
    for i, profile in enumerate(c.layers):
        names += [f"{i}.w1_boundary", f"{i}.w2_boundary"] * (profile == "self_modifying")
        names += [f"{i}.cms_f"] * bool(c.n_cms)
    return names


def close_chunks(ops: Ops, c: HopeConfig, power: float) -> None:
    """Write every `present.` slow tensor: stepped in rows that reach a boundary, else as it was.

    `power` is rms(|E|)^2 of the embedding E `[V, d]`.
    """
    if names := slow_names(c):
        periods = (*c.cms_periods, *(c.memory_period,) * ("self_modifying" in c.layers))
        branch_at(ops, math.gcd(*periods), names, lambda closing: close_blocks(closing, c))
    if c.top_rank:
        branch_at(ops, c.top_period, ["top.f"], lambda closing: [close_top(closing, c, power)])


def branch_at(ops: Ops, period: int, names: list[str], close: Callable[[Ops], list[str]]) -> None:
    """Write the `present.` tensors of `names`: by `close` in the rows that reach a multiple of `period`."""
    at = at_multiple(ops, "position", (period,))
    reached = ops("Cast", ops("ReduceMax", ops("Cast", at, to=TensorProto.INT32), keepdims=0), to=TensorProto.BOOL)
    closing, idle = ops.branch(), ops.branch()
    closed = closing.graph("close", [], [typed(value) for value in in_rows(closing, at, names, close)])
    kept = idle.graph("keep", [], [typed(idle("Identity", f"past.{name}")) for name in names])
    ops.many("If", reached, outputs=[f"present.{n}" for n in names], then_branch=closed, else_branch=kept)


def in_rows(ops: Ops, at: str, names: list[str], close: Callable[[Ops], list[str]]) -> list[str]:
    """New value of the tensors of `names`: what `close` makes of the rows marked in `at [B]` alone, in their places."""
    rows = ops("Transpose", ops("NonZero", at), perm=[1, 0])
    flat = ops("Squeeze", rows, ops.ints(1))
    first = len(ops.nodes)
    values = close(ops)
    work = ops.nodes[first:]
    del ops.nodes[first:]
    read = sorted({name for node in work for name in node.input if name.startswith("past.") or name in PER_ROW})
    chosen = {name: ops("Gather", name, flat, axis=0) for name in read}
    for node in work:
        node.input[:] = [chosen.get(name, name) for name in node.input]
    ops.nodes.extend(work)
    return [ops("ScatterND", f"past.{n}", rows, value) for n, value in zip(names, values, strict=True)]


def at_multiple(ops: Ops, position: str, periods: tuple[int, ...]) -> str:
    """Whether each position `[..., 1]` or `[B]` is a multiple of each period."""
    return ops("Equal", ops("Mod", position, ops.ints(*periods)), ops.ints(0))


def scale_and_mask(ops: Ops, column: int, periods: tuple[int, ...], rank: int) -> tuple[str, str]:
    """An adapt scale, and whether a row closes a chunk of each period and its scale is above 0.

    Both have `rank` axes: rows, then periods, then ones.
    """
    scale = ops("Gather", "adapt", ops.ints(column), axis=1)
    closing = at_multiple(ops, ops("Unsqueeze", "position", ops.ints(1)), periods)
    closing = ops("And", closing, ops("Greater", scale, ops.const(0)))
    ones = [1] * (rank - 2)
    return ops.reshape(scale, 0, 1, *ones), ops.reshape(closing, 0, len(periods), *ones)


def close_blocks(ops: Ops, c: HopeConfig) -> list[str]:
    """New value of every tensor of `slow_names`."""
    results = []
    if "self_modifying" in c.layers:
        _, promoted = scale_and_mask(ops, 0, (c.memory_period,), 4)
    if c.n_cms:
        slow, closing = scale_and_mask(ops, 1, c.cms_periods, 4)
    for i, profile in enumerate(c.layers):
        if profile == "self_modifying":
            pairs = ((f"past.{i}.{name}", f"past.{i}.{name}_boundary") for name in ("w1", "w2"))
            results += [ops("Where", promoted, running, boundary) for running, boundary in pairs]
        if c.n_cms:
            results.append(close_cms(ops, c, i, closing, slow))
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


def close_top(ops: Ops, c: HopeConfig, power: float) -> str:
    """F <- lambda F - eps / power * sum_t p_t g_t^T with the pending chunk's exact gradients g, |F| bounded."""
    first = ops("Slice", "input_ids", ops.ints(0), ops.ints(1), ops.ints(1))
    return step_top(ops, c, power, pending_gradient(ops, c, first))


def pending_gradient(ops: Ops, c: HopeConfig, first: str) -> str:
    """g `[B, C, d]` of the pending tokens, whose last target is the token `first [B, 1]`."""
    known = ops("Slice", "past.top.token", ops.ints(1), ops.ints(c.top_period), ops.ints(1))
    targets = ops("Concat", ops("Cast", known, to=TensorProto.INT64), first, axis=1)
    guess = ops("Softmax", ops.unembed("past.top.h"), axis=-1)
    return ops("Sub", ops.mix(guess), ops.embed(targets))


def step_top(ops: Ops, c: HopeConfig, power: float, g: str) -> str:
    """F of the top level in rows that close a chunk: stepped on the pending gradients g `[B, C, d]`."""
    slow, closing = scale_and_mask(ops, 1, (c.top_period,), 3)
    eps = ops("Mul", ops("Sigmoid", "rule.top.step"), ops.const(2 / power))
    gradient = ops("Mul", eps, ops.product("past.top.p", g, 3, trans_x=True))
    stepped = ops("Sub", decayed(ops, "past.top.f", slow, "rule.top.decay", (1,)), gradient)
    square = ops("ReduceSumSquare", stepped, ops.ints(1, 2), keepdims=1)
    norm = ops("Sqrt", ops("Add", square, ops.const(1e-12)))
    scale = ops("Min", ops.const(1), ops("Div", ops.const(c.norm_cap / np.sqrt(power)), norm))
    return ops("Where", closing, ops("Mul", stepped, scale), "past.top.f")
