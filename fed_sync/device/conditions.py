"""Whether now is a good time to train and to send: power, a link that costs nothing, a device at rest."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Protocol

import psutil  # type: ignore[import-untyped]


class Conditions(Protocol):
    """Asked before each contact, and again before each training."""

    def hindrance(self, now: float) -> str | None:
        """Why not now, as a word or two for the status; None if nothing is in the way."""


@dataclasses.dataclass(frozen=True)
class QuietHours:
    """Hours of the day, local time, in which the agent keeps still; they may go over midnight."""

    start: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> QuietHours:
        """`22:00-06:30`. Raises ValueError."""
        start, _, end = text.partition("-")
        return cls(datetime.time.fromisoformat(start), datetime.time.fromisoformat(end))

    def contains(self, moment: datetime.time) -> bool:
        """Whether the agent keeps still at that time of day."""
        if self.start <= self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


@dataclasses.dataclass(frozen=True)
class DeviceConditions:
    """What this device can tell of itself, and what its owner says of it.

    `metered` is the owner's word: no library tells it on every system. A device without a battery is on power.
    """

    quiet: QuietHours | None = None
    metered: bool = False
    needs_power: bool = True
    min_battery: float = 0.3
    """Share of a battery below which even a device on power keeps still."""
    max_load: float | None = None
    """Load of the last minute for each core above which the device is not at rest; None asks nothing."""
    busy: Callable[[], bool] = lambda: False
    """Whether turns are running."""

    def hindrance(self, now: float) -> str | None:
        """Why not now, None if nothing is in the way."""
        if self.metered:
            return "metered link"
        if self.quiet and self.quiet.contains(datetime.datetime.fromtimestamp(now).time()):
            return "quiet hours"
        return self._power() or self._rest()

    def _power(self) -> str | None:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        if battery is None:
            return None
        if self.needs_power and battery.power_plugged is False:
            return "on battery"
        return "battery low" if battery.percent < 100 * self.min_battery else None

    def _rest(self) -> str | None:
        if self.busy():
            return "turns are running"
        if self.max_load is None:
            return None
        return "busy" if psutil.getloadavg()[0] > self.max_load * (psutil.cpu_count() or 1) else None
