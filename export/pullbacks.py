"""The gradient of each operator of the model, as graph nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, helper, numpy_helper

from fednl_runtime.export.ops import Ops

Shape = tuple[int, ...]
Pullback = Callable[["Tape", NodeProto, list[str]], Sequence[str]]
"""From the gradients of a node's outputs ("" is zero) to those of its first inputs."""


def attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


class Tape:
    """Gradient nodes are added to `ops`; `shapes` holds the static shape of every value of the forward nodes."""

    def __init__(self, ops: Ops, shapes: Mapping[str, Shape]) -> None:
        self.ops, self.shapes = ops, shapes

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """The value of a constant input."""
        return numpy_helper.to_array(self.ops.initializers[name])

    def zeros(self, shape: Shape) -> str:
        """A tensor of zeros."""
        return self.ops("Expand", self.ops.const(0), self.ops.ints(*shape))

    def reshaped(self, x: str, shape: Shape) -> str:
        """x with a static shape."""
        return self.ops("Reshape", x, self.ops.ints(*shape))

    def summed_to(self, g: str, shape: Shape, wide: Shape) -> str:
        """A gradient of shape `wide`, summed over the axes along which an operand of `shape` was repeated."""
        if shape == wide:
            return g
        lead = len(wide) - len(shape)
        axes = [i for i, n in enumerate(wide) if i < lead or (shape[i - lead] == 1 and n != 1)]
        if axes:
            g = self.ops("ReduceSum", g, self.ops.ints(*axes), keepdims=1)
        return self.reshaped(g, shape) if lead else g

    def repeated(self, g: str, node: NodeProto) -> str:
        """The gradient of a reduction over constant axes, shaped to broadcast against its input."""
        shape = self.shapes[node.input[0]]
        axes = {int(a) % len(shape) for a in self.numbers(node.input[1])}
        return self.reshaped(g, tuple(1 if i in axes else n for i, n in enumerate(shape)))

    def embedded(self, g: str, axis: int, before: int, after: int) -> str:
        """g between zeros along one axis."""
        if not before and not after:
            return g
        return self.ops("Pad", g, self.ops.ints(before, after), "", self.ops.ints(axis))

    def total(self, terms: Sequence[str]) -> str:
        """The sum of gradients, "" of none."""
        terms = [term for term in terms if term]
        return self.ops("Sum", *terms) if len(terms) > 1 else "".join(terms)


def _operands(tape: Tape, node: NodeProto, first: str, second: str) -> tuple[str, str]:
    """Gradients of two broadcast operands, summed to their shapes."""
    wide = tape.shapes[node.output[0]]
    a, b = (tape.summed_to(g, tape.shapes[x], wide) for g, x in ((first, node.input[0]), (second, node.input[1])))
    return a, b


def _add(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return _operands(tape, node, g[0], g[0])


def _sub(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return _operands(tape, node, g[0], tape.ops("Neg", g[0]))


def _mul(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    a, b = node.input
    return _operands(tape, node, tape.ops("Mul", g[0], b), tape.ops("Mul", g[0], a))


def _div(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    share = tape.ops("Div", g[0], node.input[1])
    return _operands(tape, node, share, tape.ops("Neg", tape.ops("Mul", share, node.output[0])))


def _choice(condition: str) -> Pullback:
    """Of the larger or smaller of two, which is the first where `condition` holds."""

    def pullback(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
        first = tape.ops(condition, node.input[0], node.input[1])
        return _picked(tape, node, first, g[0])

    return pullback


def _picked(tape: Tape, node: NodeProto, first: str, g: str) -> tuple[str, str]:
    zero = tape.ops.const(0)
    return _operands(tape, node, tape.ops("Where", first, g, zero), tape.ops("Where", first, zero, g))


def _where(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    condition, wide, zero = node.input[0], tape.shapes[node.output[0]], tape.ops.const(0)
    pair = (("Where", condition, g[0], zero), ("Where", condition, zero, g[0]))
    return [
        "",
        *(tape.summed_to(tape.ops(*p), tape.shapes[x], wide) for p, x in zip(pair, node.input[1:], strict=True)),
    ]


def _neg(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.ops("Neg", g[0])]


def _exp(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.ops("Mul", g[0], node.output[0])]


def _sqrt(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.ops("Div", tape.ops("Mul", g[0], tape.ops.const(0.5)), node.output[0])]


def _sigmoid(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    """1 - y is taken as the sigmoid of -x, which keeps its digits where y is close to 1."""
    rest = tape.ops("Sigmoid", tape.ops("Neg", node.input[0]))
    return [tape.ops("Mul", g[0], tape.ops("Mul", node.output[0], rest))]


def _softplus(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.ops("Mul", g[0], tape.ops("Sigmoid", node.input[0]))]


def _reduce_sum(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    shape = tape.shapes[node.input[0]]
    return [tape.ops("Expand", tape.repeated(g[0], node), tape.ops.ints(*shape))]


def _reduce_sum_square(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.ops("Mul", tape.ops("Mul", tape.repeated(g[0], node), tape.ops.const(2)), node.input[0])]


def _reduce_l2(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    norm = tape.ops("Max", node.output[0], tape.ops.const(1e-30))
    return [tape.ops("Mul", tape.repeated(tape.ops("Div", g[0], norm), node), node.input[0])]


def _rms(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    """y = r x gain with r = 1 / sqrt(mean(x^2) + eps): dx = r gain dy - x r^2 mean(y dy)."""
    ops, (x, gain), y = tape.ops, node.input, node.output[0]
    width, last = tape.shapes[x][-1], tape.ops.ints(-1)
    square = ops("Mul", ops("ReduceSumSquare", x, last, keepdims=1), ops.const(1 / width))
    variance = ops("Add", square, ops.const(attributes(node)["epsilon"]))
    along = ops("Mul", ops("ReduceSum", ops("Mul", y, g[0]), last, keepdims=1), ops.const(1 / width))
    direct = ops("Div", ops("Mul", g[0], gain), ops("Sqrt", variance))
    return [ops("Sub", direct, ops("Mul", x, ops("Div", along, variance)))]


def _matmul(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    """dA = dY B^T and dB = A^T dY, each over the last two axes."""
    a, b, wide = node.input[0], node.input[1], tape.shapes[node.output[0]]
    of_a, of_b = tape.shapes[a], tape.shapes[b]
    first = tape.ops("MatMul", g[0], _flipped(tape, b, len(of_b)))
    first = tape.summed_to(first, of_a, (*wide[:-2], *of_a[-2:]))
    if len(of_a) == len(of_b) == len(wide) >= 5 and of_b[1] == 1 < of_a[1]:
        return [first, _summed_over_tokens(tape, node, g[0])]
    second = tape.ops("MatMul", _flipped(tape, a, len(of_a)), g[0])
    return [first, tape.summed_to(second, of_b, (*wide[:-2], *of_b[-2:]))]


def _summed_over_tokens(tape: Tape, node: NodeProto, g: str) -> str:
    """A^T dY where B `[B, 1, ..., n, m]` is the same for all tokens: their sum is part of the product."""
    a, wide, of_b = node.input[0], tape.shapes[node.output[0]], tape.shapes[node.input[1]]
    rows, out = _folded(tape, a, tape.shapes[a]), _folded(tape, g, wide)
    product = tape.ops("MatMul", _flipped(tape, rows, len(wide) - 1), out)
    own = (of_b[0], *of_b[2:])
    return tape.reshaped(tape.summed_to(product, own, (wide[0], *wide[2:-2], *own[-2:])), of_b)


def _flipped(tape: Tape, x: str, rank: int) -> str:
    return tape.ops("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _folded(tape: Tape, x: str, shape: Shape) -> str:
    """x `[B, T, ..., n, m]` as `[B, ..., T n, m]`."""
    rank = len(shape)
    moved = tape.ops("Transpose", x, perm=[0, *range(2, rank - 2), 1, rank - 2, rank - 1])
    return tape.reshaped(moved, (shape[0], *shape[2:-2], shape[1] * shape[-2], shape[-1]))


def _transpose(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    perm = attributes(node)["perm"]
    return [tape.ops("Transpose", g[0], perm=[int(i) for i in np.argsort(perm)])]


def _reshape(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return [tape.reshaped(g[0], tape.shapes[node.input[0]])]


def _identity(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    return g


def _split(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    parts = [part or tape.zeros(tape.shapes[out]) for part, out in zip(g, node.output, strict=True)]
    return [tape.ops("Concat", *parts, axis=attributes(node)["axis"])]


def _concat(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    axis = int(attributes(node)["axis"])
    return tape.ops.split(g[0], [tape.shapes[x][axis] for x in node.input], axis)


def _slice(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    (start,), (axis,) = tape.numbers(node.input[1]), tape.numbers(node.input[3])
    length, kept = tape.shapes[node.input[0]][axis], tape.shapes[node.output[0]][axis]
    before = int(start) % length
    return [tape.embedded(g[0], int(axis), before, length - before - kept)]


def _gather(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    """Each run of neighbouring indices goes back to its place."""
    indices, shape = tape.numbers(node.input[1]), tape.shapes[node.input[0]]
    axis = int(attributes(node).get("axis", 0)) % len(shape)
    chosen = indices.reshape(-1)
    g_axis = tape.reshaped(g[0], (*shape[:axis], len(chosen), *shape[axis + 1 :]))
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
    parts = tape.ops.split(g_axis, [len(run) for run in runs], axis) if len(runs) > 1 else [g_axis]
    length = shape[axis]
    places = ((part, int(run[0]), length - int(run[0]) - len(run)) for part, run in zip(parts, runs, strict=True))
    return [tape.total([tape.embedded(part, axis, before, after) for part, before, after in places])]


def _tile(tape: Tape, node: NodeProto, g: list[str]) -> Sequence[str]:
    repeats, shape = tape.numbers(node.input[1]), tape.shapes[node.input[0]]
    pairs = [(int(r), n) for r, n in zip(repeats, shape, strict=True)]
    wide = tape.reshaped(g[0], tuple(itertools.chain(*pairs)))
    return [tape.ops("ReduceSum", wide, tape.ops.ints(*range(0, 2 * len(shape), 2)), keepdims=0)]


PULLBACKS: Mapping[str, Pullback] = {
    "Add": _add,
    "Concat": _concat,
    "Div": _div,
    "Exp": _exp,
    "Gather": _gather,
    "Identity": _identity,
    "MatMul": _matmul,
    "Max": _choice("GreaterOrEqual"),
    "Min": _choice("LessOrEqual"),
    "Mul": _mul,
    "Neg": _neg,
    "RMSNormalization": _rms,
    "ReduceL2": _reduce_l2,
    "ReduceSum": _reduce_sum,
    "ReduceSumSquare": _reduce_sum_square,
    "Reshape": _reshape,
    "Sigmoid": _sigmoid,
    "Slice": _slice,
    "Softplus": _softplus,
    "Split": _split,
    "Sqrt": _sqrt,
    "Sub": _sub,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
    "Where": _where,
}
"""The gradient of every operator that a rule or a memory can reach."""
