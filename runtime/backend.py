"""The seam between the engine and whatever computes the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Protocol

from fednl_runtime.config import HopeConfig
from fednl_runtime.state import Array, MemoryState, Tokens

LEARN, FREEZE = (1.0, 1.0), (1.0, 0.0)
"""Adapt scales of a row: everything learns, or the slow levels are left alone and the token memories go on."""


class Stream(Protocol):
    """Sessions in the rows of its own state buffers; one owner, one thread."""

    def feed(self, tokens: Tokens, adapt: Array, first: int = 0) -> Array:
        """Read tokens `[B, T]` in the B rows from `first` on, with adapt scales `[B, 2]`; return logits `[B, T, V]`.

        The call may not cross a multiple of `Backend.segment` in any row. The logits are a view that
        the next call overwrites.
        """

    def snapshot(self, row: int | None = None) -> MemoryState:
        """An owning copy of the state after the last `feed`: of one row, or of all."""

    def put(self, row: int, state: MemoryState) -> None:
        """Replace a row by a state of one."""

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""


class Backend(Protocol):
    """A loaded model: immutable, shared by all streams."""

    config: HopeConfig
    fingerprint: str
    """SHA-256 of configuration and weights: a memory made with other ones means nothing here."""
    segment: int
    """Calls never cross a multiple of this many tokens of absolute position."""

    def open(self, state: MemoryState) -> Stream:
        """A stream that continues from `state`; the state itself is left alone."""

    def with_rules(self, rules: Mapping[str, Array]) -> Backend:
        """The same model with some rules replaced, by name `rule.*`; streams already open keep theirs.

        Raises ModelFileError if they are none of this model's, or not finite.
        """


def segments(position: int, num_tokens: int, segment: int) -> list[slice]:
    """Cut `num_tokens` tokens that start at `position` at the multiples of `segment`.

    >>> segments(14, 20, 16)
    [slice(0, 2, None), slice(2, 18, None), slice(18, 20, None)]
    """
    cuts = [0, *range(segment - position % segment, num_tokens, segment), num_tokens]
    return [slice(a, b) for a, b in itertools.pairwise(cuts) if b > a]
