"""Turns side by side in the rows of one stream, so that those which choose tokens run as one batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from fednl_runtime.backend import LEARN, Backend
from fednl_runtime.state import Array, MemoryState

GAIN = 1.05
"""How many times more tokens a second a larger batch must read to be worth having."""
TRIALS = 6
LONGEST = 128
"""Tokens that are read in one call at most: a longer one reads no more tokens a second and stalls others for longer."""


@dataclasses.dataclass(eq=False)
class Slot:
    """A turn's place among others; `row` changes as neighbours come and go. `adapt [2]` are its scales."""

    slots: Slots
    row: int
    adapt: tuple[float, float]

    def snapshot(self) -> MemoryState:
        """An owning copy of the turn's memory."""
        return self.slots.stream.snapshot(self.row)

    def close(self) -> None:
        """Leave the place to another turn."""
        self.slots.close(self)


@dataclasses.dataclass(frozen=True)
class Feed:
    """What a turn wants read next: tokens within one segment."""

    slot: Slot
    tokens: tuple[int, ...]


class Slots:
    """The places of one backend; one owner, one thread."""

    def __init__(self, backend: Backend, capacity: int) -> None:
        self.backend, self.capacity = backend, capacity
        self.batch = capacity
        """Single tokens that are read in one call at most."""
        self.piece = self.longest = min(LONGEST, backend.segment)
        """Tokens of a prompt that are read in one call at most."""
        self.stream = backend.open(MemoryState.zeros(backend.config, capacity))
        self._taken: list[Slot] = []

    def open(self, state: MemoryState, adapt: tuple[float, float]) -> Slot:
        """A place that continues from `state`, of which it keeps a copy."""
        assert len(self._taken) < self.capacity, "the scheduler runs no more turns than there are places"
        slot = Slot(self, len(self._taken), adapt)
        self.stream.put(slot.row, state)
        self._taken.append(slot)
        return slot

    def close(self, slot: Slot) -> None:
        """Free a place, once or more often."""
        if slot in self._taken:
            self._swap(slot, self._taken[-1])
            self._taken.pop()

    def read(self, feeds: Sequence[Feed]) -> Array:
        """Read for each of several turns the same number of tokens T: logits `[B, T, V]`, valid until the next call."""
        if len(feeds) > 1:  # side by side, at the front; they stay there from call to call
            for row, feed in enumerate(feeds):
                self._swap(feed.slot, self._taken[row])
        tokens = np.array([feed.tokens for feed in feeds], np.int64)
        adapt = np.array([feed.slot.adapt for feed in feeds], np.float32)
        return self.stream.feed(tokens, adapt, feeds[0].slot.row)

    def calibrate(self) -> None:
        """Measure how many tokens are best read in one call: the smallest batch that hardly any other outruns."""
        slots = [self.open(MemoryState.zeros(self.backend.config), LEARN) for _ in range(self.capacity)]
        batches = {size: [Feed(slot, (0,)) for slot in slots[:size]] for size in sizes(self.capacity)}
        trials = [{size: self._seconds(feeds) for size, feeds in batches.items()} for _ in range(TRIALS)]
        rates = {size: size / min(trial[size] for trial in trials) for size in batches}
        self.batch = min(size for size, rate in rates.items() if GAIN * rate >= max(rates.values()))
        for slot in slots:
            slot.close()

    def _seconds(self, feeds: list[Feed]) -> float:
        began = time.perf_counter()
        self.read(feeds)
        return time.perf_counter() - began

    def _swap(self, slot: Slot, other: Slot) -> None:
        if slot is not other:
            self.stream.swap(slot.row, other.row)
            self._taken[slot.row], self._taken[other.row] = other, slot
            slot.row, other.row = other.row, slot.row


def sizes(capacity: int) -> list[int]:
    """1, 2, 4, ... up to `capacity`, which is the last.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    powers = [1 << i for i in range(capacity.bit_length())]
    return sorted({*(size for size in powers if size <= capacity), capacity})
