"""When a device contacts the endpoint next: spread over time, so that a fleet never comes as a herd."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

Trouble = Literal["transient", "auth", "permanent"]
"""Why a contact failed: the network or the endpoint's state; the clock or the key; a request that stays wrong."""

LONGEST_S = 7 * 86_400
"""However long the endpoint asks a device to wait, it comes back after a week."""


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds between contacts."""

    interval_s: float = 3600.0
    """After a success, unless the endpoint says otherwise."""
    base_s: float = 30.0
    """After the first failure; doubled with each further one."""
    cap_s: float = 900.0
    auth_s: float = 3600.0
    permanent_s: float = 4 * 3600.0


def first_delay(pace: Pace, rng: random.Random) -> float:
    """Seconds until a device that was never here comes: a fleet switched on at once is spread out."""
    return rng.uniform(0, min(pace.interval_s, pace.cap_s))


def delay_after_success(pace: Pace, next_sync: tuple[float, float] | None, rng: random.Random) -> float:
    """Seconds until the next contact, within the bounds that the endpoint named, if it did."""
    low, high = next_sync or (pace.interval_s, 1.2 * pace.interval_s)
    low = min(max(low, 0.0), LONGEST_S)
    return rng.uniform(low, min(max(high, low), LONGEST_S))


def delay_after_failure(
    pace: Pace, failures: int, trouble: Trouble, retry_after: float | None, rng: random.Random
) -> float:
    """Seconds until the next try after so many failures in a row.

    The doubling is capped first and then multiplied by 1 to 2: jitter before the cap would be cut off by
    it, and the fleet would come back in step. A failure never brings a device back sooner than a success.
    """
    doubled = pace.base_s * 2.0 ** min(failures - 1, 32)
    waits = {"transient": 0.0, "auth": pace.auth_s, "permanent": pace.permanent_s}
    capped = max(min(doubled, pace.cap_s), min(pace.interval_s, pace.cap_s), waits[trouble])
    return min(max(capped, retry_after or 0.0), LONGEST_S) * rng.uniform(1, 2)
