"""How many requests a minute a caller may send."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """A bucket of `per_minute` requests for each caller, filled evenly; of one event loop.

    There are as many buckets as keys: callers are known before they are counted.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, key_id: str) -> float:
        """Count a request: 0 if it may come in, else the seconds until the next one may."""
        now = self._clock()
        left, then = self._buckets.get(key_id, (float(self._per_minute), now))
        left = min(self._per_minute, left + (now - then) * self._per_minute / 60)
        admitted = left >= 1
        self._buckets[key_id] = (left - admitted, now)
        return 0.0 if admitted else (1 - left) * 60 / self._per_minute
