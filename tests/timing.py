"""Time limits that hold on a machine shared with others: stretched by what this process has to wait for a core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def load_factor() -> float:
    """Wall time over CPU time of a short loop: 1 where a core is free, 4 where four processes share it."""
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.1:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.thread_time() - cpu))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer than `seconds` on a free core, as busy as the machine is before or after."""
    before, begin = load_factor(), time.monotonic()
    yield
    elapsed = time.monotonic() - begin
    allowed = seconds * max(before, load_factor())
    assert elapsed < allowed, f"{elapsed:.2f} s, more than the {allowed:.2f} s allowed"
