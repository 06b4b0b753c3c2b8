"""The decode thread: runs jobs in small steps, one step each in turn."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from fednl_runtime.errors import QueueFullError, SessionBusyError, ShuttingDownError
from fednl_runtime.session import SessionKey


@dataclasses.dataclass(eq=False)
class Job:
    """A generator of events to be run step by step.

    `deliver` gets every event, then what the generator returns or the exception that ended it; it is
    called from the decode thread and must not block. `key` is held from the first step until `close`.
    """

    steps: Generator[Any, None, Any]
    deliver: Callable[[Any], None]
    key: SessionKey | None = None
    deadline: float | None = None
    """Monotonic time at which the job gives up waiting for its key, once it has begun to."""
    closed: bool = False
    finished: bool = False
    holds_key: bool = False


class Scheduler:
    """One thread, `slots` jobs side by side, at most `queue` waiting, one job a key."""

    def __init__(self, slots: int, queue: int, busy_wait_s: float) -> None:
        self._slots, self._queue, self._busy_wait_s = slots, queue, busy_wait_s
        self._wake = threading.Condition()
        self._waiting: list[Job] = []
        self._active: collections.deque[Job] = collections.deque()
        self._keys: set[SessionKey] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="fednl-decode", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            QueueFullError: too many jobs wait already.
            ShuttingDownError: `shutdown` was called.
        """
        with self._wake:
            if self._closed:
                raise ShuttingDownError("The engine is shutting down; try again later.")
            # Counted together: a burst may arrive before the thread has filled its slots.
            if len(self._waiting) + len(self._active) >= self._queue + self._slots:
                raise QueueFullError(f"{self._queue} turns are waiting already; try again in a moment.")
            self._waiting.append(job)
            self._wake.notify()

    def close(self, job: Job) -> None:
        """Nothing more is wanted of the job: stop it at its next step, or release its key if it has finished."""
        with self._wake:
            job.closed = True
            if job.finished:
                self._release(job)
            self._wake.notify()

    def load(self) -> tuple[int, int]:
        """How many jobs run, and how many wait."""
        with self._wake:
            return len(self._active), len(self._waiting)

    def shutdown(self) -> None:
        """Stop the thread after the step it is in; jobs that were not finished get ShuttingDownError."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._next_job()) is not None:
            self._step(job)
        for job in (*self._active, *self._waiting):
            job.deliver(ShuttingDownError("The engine is shutting down; the turn was rolled back."))

    def _next_job(self) -> Job | None:
        with self._wake:
            while not self._closed:
                self._admit()
                if self._active:
                    self._active.rotate(-1)
                    return self._active[-1]
                self._wake.wait(self._patience())
            return None

    def _admit(self) -> None:
        for job in list(self._waiting):
            if job.closed:
                self._waiting.remove(job)
            elif job.key in self._keys:
                self._expire(job, time.monotonic())
            elif len(self._active) < self._slots:
                self._waiting.remove(job)
                self._active.append(job)
                self._hold(job)

    def _expire(self, job: Job, now: float) -> None:
        if job.deadline is None:
            job.deadline = now + self._busy_wait_s
        if now >= job.deadline:
            self._waiting.remove(job)
            name = None if job.key is None else job.key.id
            job.deliver(SessionBusyError(f"Another turn is still writing to session {name!r}; try again later."))

    def _patience(self) -> float | None:
        """Seconds until a waiting job gives up; None if none can."""
        deadlines = [job.deadline for job in self._waiting if job.key in self._keys and job.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _step(self, job: Job) -> None:
        if job.closed:
            job.steps.close()
            self._finish(job)
            return
        try:
            event = next(job.steps)
        except StopIteration as end:
            self._finish(job)
            event = end.value
        except Exception as error:
            job.closed = True
            self._finish(job)
            event = error
        job.deliver(event)

    def _finish(self, job: Job) -> None:
        with self._wake:
            self._active.remove(job)
            job.finished = True
            if job.closed:
                self._release(job)

    def _hold(self, job: Job) -> None:
        if job.key is not None:
            self._keys.add(job.key)
            job.holds_key = True

    def _release(self, job: Job) -> None:
        if job.holds_key and job.key is not None:
            job.holds_key = False
            self._keys.discard(job.key)
