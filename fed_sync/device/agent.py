"""The sync agent: a thread that contacts the endpoint when it is time; whatever fails there, the device goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fednl_runtime.errors import FednlError, StoreError
from fednl_runtime.fed_sync.device.client import ContactError
from fednl_runtime.fed_sync.device.conditions import Conditions
from fednl_runtime.fed_sync.device.local_training import StoppedError
from fednl_runtime.fed_sync.device.participant import Participant
from fednl_runtime.fed_sync.device.schedule import (
    LONGEST_S,
    Pace,
    Trouble,
    delay_after_failure,
    delay_after_success,
    first_delay,
)

log = logging.getLogger("fednl_runtime.sync")

NICENESS = 19
LOOK_AGAIN_S = 60.0
"""Longest sleep, so that a clock that is set does not keep the agent asleep."""


class Agent:
    """Contacts on a schedule; `start` runs it in a thread of its own, `tick` does what is due here and now.

    The other methods may be called from any thread.
    """

    def __init__(
        self,
        participant: Participant,
        conditions: Conditions,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._participant, self._conditions = participant, conditions
        self._pace, self._clock, self._rng = pace or Pace(), clock, rng or random.Random()
        self._notes = participant.device.notes
        self._thread: threading.Thread | None = None
        self._stop, self._wake, self._flush = threading.Event(), threading.Event(), threading.Event()
        self._failures = int(self._notes.get("failures", 0))
        noted = self._notes.get("next_contact")
        self._next = self._first() if noted is None or noted < clock() else self._planned(noted)
        self._state = "idle"

    def start(self) -> None:
        """Begin; contacts are made in a thread of low priority that never keeps the process from ending."""
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End; a contact that hangs is left behind."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def stopped(self) -> bool:
        """Whether nothing uses the device's folder any more."""
        return self._thread is None or not self._thread.is_alive()

    def flush(self) -> None:
        """Contact the endpoint now, whatever the schedule and the conditions say, unless paused."""
        self._flush.set()
        self._wake.set()

    def pause(self) -> None:
        """Contact and train no more until `resume`, over restarts too. Raises StoreError."""
        self._notes.set(paused=True)

    def resume(self) -> None:
        """Go on. Raises StoreError."""
        self._notes.set(paused=False)
        self._wake.set()

    def tick(self) -> float:
        """Contact the endpoint if it is time; seconds until something may be due again. Never raises."""
        try:
            if self._notes.get("paused", False):
                return LOOK_AGAIN_S
            self._next = self._planned(self._next)
            flushed = self._flush.is_set()
            self._flush.clear()
            if not flushed and self._clock() < self._next:
                return self._next - self._clock()
            hindrance = None if flushed else self._hindrance()
            if hindrance is not None:
                self._postpone(hindrance)
            else:
                self._contact(flushed)
        except Exception:  # a full disk or our own mistake must not end the agent
            log.exception("the sync agent failed; it goes on")
            self._next = self._clock() + delay_after_failure(self._pace, 10, "transient", None, self._rng)
        return max(self._next - self._clock(), 0.0)

    def status(self) -> dict[str, Any]:
        """What an operator may know: plain values, nothing personal. Raises StoreError."""
        participant, notes = self._participant, self._notes
        device, now = participant.device, self._clock()
        enrolment = device.enrolment()
        up, down = notes.spent(now)
        told = ("last_success", "last_error", "hindrance", "reason", "learnt", "refused", "refused_because")
        return {
            "state": "paused" if notes.get("paused", False) else self._state,
            "endpoint": participant.invitation.url,
            "population": participant.invitation.population,
            "device_id": enrolment.device_id if enrolment else None,
            "version": participant.version,
            "seen_version": notes.get("seen", 0),
            "on_probation": notes.get("probation") is not None,
            "next_contact": self._next,
            "failures": self._failures,
            "clock_offset_s": notes.get("clock_offset", 0.0),
            **{name: notes.get(name) for name in told},
            "recent_tokens": device.recent.tokens(),
            "outbox": device.outbox.counts(),
            "updates": device.outbox.fates(),
            "bytes_today": {"up": up, "down": down},
        }

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, where the system can
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stop.is_set():
            self._wake.clear()
            delay = self.tick()
            if not self._flush.is_set():
                self._wake.wait(min(delay, LOOK_AGAIN_S))

    def _hindrance(self) -> str | None:
        up, down = self._notes.spent(self._clock())
        if up + down >= self._participant.settings.bytes_per_day:
            return "bytes of the day are spent"
        return self._conditions.hindrance(self._clock())

    def _postpone(self, hindrance: str) -> None:
        """Look again later, at a time of this device's own: the end of quiet hours must not start a herd."""
        self._state = "waiting"
        self._next = self._clock() + self._rng.uniform(0.5, 1) * min(self._pace.cap_s, self._pace.interval_s)
        self._notes.set(hindrance=hindrance)

    def _contact(self, flushed: bool) -> None:
        self._state = "syncing"
        try:
            next_sync = self._participant.contact(lambda: self._must_stop(flushed))
        except StoppedError:
            self._plan(delay_after_success(self._pace, None, self._rng), hindrance="stopped while training")
        except ContactError as error:
            self._fail(error.code, str(error), error.trouble, error.retry_after)
        except FednlError as error:
            self._fail(type(error).__name__, str(error), "permanent", None)
        except Exception as error:
            log.exception("a contact failed by a mistake of ours; the rules in use are kept")
            self._fail("internal", type(error).__name__, "permanent", None)
        else:
            self._failures = 0
            delay = delay_after_success(self._pace, next_sync, self._rng)
            self._plan(delay, last_success=self._clock(), last_error=None, hindrance=None)
        finally:
            self._state = "idle"

    def _must_stop(self, flushed: bool) -> bool:
        """Whether training is to end: asked between its steps."""
        if self._stop.is_set() or self._notes.get("paused", False):
            return True
        return not flushed and self._conditions.hindrance(self._clock()) is not None

    def _fail(self, code: str, message: str, trouble: Trouble, retry_after: float | None) -> None:
        self._failures += 1
        log.warning("a contact with the endpoint failed (%s): %s", code, message)
        delay = delay_after_failure(self._pace, self._failures, trouble, retry_after, self._rng)
        self._plan(delay, last_error={"code": code, "message": message, "at": self._clock()})

    def _plan(self, delay: float, **facts: Any) -> None:
        """Set the next contact, and note it, so that a restart keeps it."""
        self._next = self._clock() + delay
        with contextlib.suppress(StoreError):  # without a note a restart begins anew
            self._notes.set(next_contact=self._next, failures=self._failures, **facts)

    def _first(self) -> float:
        """When a device comes that has no plan, or could not keep it: spread, like the first contact."""
        return self._clock() + first_delay(self._pace, self._rng)

    def _planned(self, moment: float) -> float:
        """A planned contact; one that no delay can have set is forgotten, for the clock was set back since."""
        return moment if moment <= self._clock() + 2 * LONGEST_S else self._first()
