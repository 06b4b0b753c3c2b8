"""Operators of one segment that have a gradient: the recurrence as matrix products, no loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednl_runtime.export.ops import Ops

BLOCKED = -1e5
"""What is added to an exponent to make it vanish."""


class SegmentOps(Ops):
    """Standard operators for a segment of a fixed number of tokens."""

    def __init__(self, segment: int, parent: Ops | None = None) -> None:
        super().__init__(portable=True, parent=parent)
        self.segment = segment

    def branch(self) -> SegmentOps:
        """A builder of a subgraph, which shares names and initializers with this one."""
        return SegmentOps(self.segment, self)

    def heads_first(self, x: str, heads: int, width: int) -> str:
        """x `[1, n, H w]` as `[1, H, n, w]`."""
        return self("Transpose", self.reshape(x, 0, 0, heads, width), perm=[0, 2, 1, 3])

    def recurrence(self, q: str, k: str, v: str, gates: Sequence[str], state: str, shape: tuple[int, int, int]) -> str:
        """As `Ops.recurrence`, for a segment in the WY form of `recurrence.delta`.

        Without beta nothing is read, and "" is returned.
        """
        heads, rows, columns = shape
        n, past, present = self.segment, f"past.{state}", f"present.{state}"
        key, value = self.heads_first(k, heads, rows), self.heads_first(v, heads, columns)
        total = self("MatMul", self("Transpose", gates[0], perm=[0, 2, 1]), self.const(np.triu(np.ones((n, n)))))
        column, row = self("Unsqueeze", total, self.ints(3)), self("Unsqueeze", total, self.ints(2))
        last = self("Slice", column, self.ints(-1), self.ints(n), self.ints(2))
        left = self("Mul", key, self("Exp", self("Sub", last, column)))
        kept = self("Mul", self("Exp", last), past)
        if len(gates) == 1:
            self("Add", kept, self.product(left, value, 4, trans_x=True), out=present)
            return ""
        reach = self("Add", self("Sub", column, row), self.const(np.triu(np.full((n, n), BLOCKED), 1)))
        reach, now = self("Exp", reach), self("Exp", column)
        beta = self("Unsqueeze", self("Transpose", gates[1], perm=[0, 2, 1]), self.ints(3))
        overlap = self("Mul", self("Mul", beta, reach), self.product(key, key, 4, trans_y=True))
        known = self("Mul", now, self("MatMul", key, past))
        writes = self("MatMul", self.inverse(overlap), self("Mul", beta, self("Sub", value, known)))
        self("Add", kept, self.product(left, writes, 4, trans_x=True), out=present)
        query = self.heads_first(q, heads, rows)
        seen = self("MatMul", self("Mul", reach, self.product(query, key, 4, trans_y=True)), writes)
        read = self("Add", self("Mul", now, self("MatMul", query, past)), seen)
        return self.reshape(self("Transpose", read, perm=[0, 2, 1, 3]), 0, 0, heads * columns)

    def inverse(self, x: str) -> str:
        """(I + the part of x below the diagonal)^-1, x `[..., n, n]`: blocks of 1, 2, 4 ... are joined in pairs.

        [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: as stable as forward substitution, which powers
        of x are not.
        """
        n, block, result = self.segment, 1, ""
        i = np.arange(n)
        while block < n:
            pair, side = i // (2 * block), i // block % 2
            joint = (pair[:, None] == pair) & (side[:, None] == 1) & (side == 0)
            below = self("Mul", x, self.const(joint))
            if result:
                below = self("MatMul", self("MatMul", result, below), result)
            result = self("Sub", result or self.const(np.eye(n)), below)
            block *= 2
        return result or self("Add", self("Mul", x, self.const(0)), self.const(1))
