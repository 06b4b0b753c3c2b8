"""The decode thread: runs jobs in small steps, one step each in turn."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from fednl_runtime.errors import QueueFullError, SessionBusyError, ShuttingDownError
from fednl_runtime.session import SessionKey
from fednl_runtime.slots import Feed, Slots

PIECE = 16
"""Tokens of a prompt that are read in one call, at least, while others choose tokens."""


@dataclasses.dataclass(eq=False)
class Job:
    """A generator of events and feeds to be run step by step.

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
    feed: Feed | None = None
    """What it waits to have read."""


class Scheduler:
    """One thread, `slots` jobs side by side, at most `queue` waiting, one job a key."""

    def __init__(self, slots: int, queue: int, busy_wait_s: float) -> None:
        self._slots, self._queue, self._busy_wait_s = slots, queue, busy_wait_s
        self._wake = threading.Condition()
        self._waiting: list[Job] = []
        self._active: list[Job] = []
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
        while self._wait():
            self._round()
        for job in (*self._active, *self._waiting):
            job.deliver(ShuttingDownError("The engine is shutting down; the turn was rolled back."))

    def _wait(self) -> bool:
        """Wait for work; let waiting jobs begin. False at the end."""
        with self._wake:
            while not self._closed:
                if began := self._admit():
                    break
                if self._active:
                    return True
                self._wake.wait(self._patience())
            else:
                return False
        for job in began:
            self._advance(job, None)
        return True

    def _round(self) -> None:
        """Read one token for every job that wants one, in batches, and one longer piece for one of the others.

        A call takes less than twice as long for twice as many tokens. So beside N jobs that choose tokens a prompt is
        read in pieces of N, which at most double the time between their tokens; of `PIECE` if they are fewer, since a
        prompt would hardly advance otherwise. Alone it is read in the longest pieces.
        """
        for job in [job for job in self._active if job.closed]:
            self._advance(job, None)
        singles = [job for job in self._active if job.feed is not None and len(job.feed.tokens) == 1]
        for slots, group in grouped(singles):
            slots.piece = max(PIECE, len(group))
            for first in range(0, len(group), slots.batch):
                self._read(slots, group[first : first + slots.batch])
        longer = next((job for job in self._active if job.feed is not None and len(job.feed.tokens) > 1), None)
        if longer is not None and longer.feed is not None:
            self._active.remove(longer)
            self._active.append(longer)
            slots = longer.feed.slot.slots
            if not singles:
                slots.piece = slots.longest
            self._read(slots, [longer])

    def _read(self, slots: Slots, jobs: list[Job]) -> None:
        """One call of the model; its logits go to the jobs before the next one overwrites them."""
        try:
            logits: Any = slots.read([job.feed for job in jobs if job.feed is not None])
        except Exception as error:
            for job in jobs:
                self._fail(job, error)
        else:
            for job, rows in zip(jobs, logits, strict=True):
                self._advance(job, rows)

    def _admit(self) -> list[Job]:
        """Let waiting jobs begin for which there is room; those that do."""
        began = []
        for job in list(self._waiting):
            if job.closed:
                self._waiting.remove(job)
            elif job.key in self._keys:
                self._expire(job, time.monotonic())
            elif len(self._active) < self._slots:
                self._waiting.remove(job)
                self._active.append(job)
                self._hold(job)
                began.append(job)
        return began

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

    def _advance(self, job: Job, logits: Any) -> None:
        """Run a job up to its next feed; `logits` are what it asked for with the last one."""
        job.feed = None
        try:
            while not job.closed:
                step = job.steps.send(logits)
                if isinstance(step, Feed):
                    job.feed = step
                    return
                job.deliver(step)
                logits = None
            job.steps.close()
            self._finish(job)
        except StopIteration as end:
            self._finish(job)
            job.deliver(end.value)
        except Exception as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        job.feed, job.closed = None, True
        job.steps.close()
        self._finish(job)
        job.deliver(error)

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


def grouped(jobs: Iterable[Job]) -> list[tuple[Slots, list[Job]]]:
    """Jobs by the slots they run in: there are several only for as long as turns last that began with older rules."""
    groups: dict[int, tuple[Slots, list[Job]]] = {}
    for job in jobs:
        assert job.feed is not None, "only jobs that wait are grouped"
        slots = job.feed.slot.slots
        groups.setdefault(id(slots), (slots, []))[1].append(job)
    return list(groups.values())
