"""Matrices of small integers, multiplied by activations rounded row by row: exact sums, whoever else is in the call."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from fednl_runtime.export.ops import MICROSOFT, Ops

LEVELS = 64
"""Largest integer of a matrix. Two products with an unsigned byte then fit in 16 bits signed, in which processors
without dot-product instructions add them up and would cut off more."""
PIECES = 3
"""Bytes of a probability: one alone would round the many small ones to 0, without which the gradient learns little."""
TINY = 1e-30
"""What a row of zeros is divided by."""
STEP = 1 / 127
"""Activations are multiples of this, relative to the largest of their row; as unsigned bytes they begin at 128."""


@dataclasses.dataclass(frozen=True)
class Integers:
    """A matrix: integers `[n, m]` times scales `[n, 1]` or `[1, m]`."""

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]

    def restore(self) -> npt.NDArray[np.float32]:
        """The matrix that is stored."""
        return self.values * self.scales


def integers(matrix: npt.NDArray[np.floating], axis: int) -> Integers:
    """Round `[n, m]` to integers with one scale for all numbers along `axis`."""
    largest = np.abs(matrix).max(axis, keepdims=True)
    scales = np.where(largest == 0, 1, largest / LEVELS).astype(np.float32)
    return Integers(np.round(matrix / scales).astype(np.int8), scales)


def rounded(ops: Ops, x: str, step: float = STEP) -> str:
    """x, multiples of `step` between -127 and 127 times it, as unsigned bytes."""
    return ops("QuantizeLinear", x, ops.const(step), ops.const(128, np.uint8))


def product(ops: Ops, x: str, matrix: str, scales: str) -> str:
    """Rows of `rounded` numbers times the integers `matrix [K, N]`, times scales `[N]` or one for all."""
    inputs = (x, matrix, ops.const(STEP), scales, ops.const(128, np.uint8))
    return ops("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)


def linear(ops: Ops, x: str, matrix: str, scales: str, out: str | None = None) -> str:
    """x `[..., K]` times a matrix `[K, N]`."""
    largest = ops("Max", ops("ReduceMax", ops("Abs", x), ops.ints(-1), keepdims=1), ops.const(TINY))
    unit = rounded(ops, ops("Div", x, largest))
    return ops("Mul", product(ops, unit, matrix, scales), largest, out=out)


def mix(ops: Ops, x: str, matrix: str, scales: str) -> str:
    """x `[B, T, K]`, no number negative, times integers `[K, N]` with scales `[K]`: as if x had 23 bits."""
    x = ops("Mul", x, scales)
    largest = ops("ReduceMax", x, ops.ints(-1), keepdims=1)
    rest, pieces, step = ops("Div", x, largest), list[str](), STEP
    for _ in range(PIECES):
        if pieces:
            rest = ops("Sub", rest, ops("DequantizeLinear", pieces[-1], ops.const(step), ops.const(128, np.uint8)))
            step /= 254  # what is left is at most half a step
        pieces.append(rounded(ops, rest, step))
    rows = product(ops, ops("Concat", *pieces, axis=1), matrix, ops.const(1))
    total, *finer = ops.many("Split", rows, outputs=PIECES, axis=1, num_outputs=PIECES)
    for i, part in enumerate(finer):
        total = ops("Add", total, ops("Mul", part, ops.const(254.0 ** -(i + 1))))
    return ops("Mul", total, largest)
