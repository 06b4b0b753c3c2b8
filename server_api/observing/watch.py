"""What is seen of one turn from outside the engine: when its events come, and how it ends."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from fednl_runtime.errors import MemoryBreachError, ShuttingDownError
from fednl_runtime.server_api.errors import STATUSES, DisconnectedError
from fednl_runtime.server_api.observing.record import CURRENT
from fednl_runtime.turn import PromptEvent, TokenEvent, TurnReport


class TurnWatch:
    """Notes a turn in the record of its request and in the metrics; without a record it notes nothing.

    As a context it notes how a turn ended that did not come to its report.
    """

    def __init__(self) -> None:
        self._record = CURRENT.get(None)
        self._meters = None if self._record is None else self._record.meters
        self._began = self._last = time.perf_counter()
        self._events = self._tokens = 0

    def __enter__(self) -> TurnWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._record is not None:
            self._note_failure(error)

    def event(self, event: Any) -> None:
        """Note when an event came; called from the decode thread."""
        if self._meters is None or not isinstance(event, PromptEvent | TokenEvent):
            return
        now, self._events = time.perf_counter(), self._events + 1
        if self._events == 1:
            self._meters.queue_wait.observe(now - self._began)
        if isinstance(event, TokenEvent):
            since, histogram = (
                (self._last, self._meters.next_token) if self._tokens else (self._began, self._meters.first_token)
            )
            histogram.observe(now - since)
            self._last, self._tokens = now, self._tokens + 1

    def report(self, report: TurnReport) -> TurnReport:
        """Note what a turn did; returns `report`."""
        if self._record is not None:
            self._record.prompt_tokens += report.prompt_tokens
            self._record.completion_tokens += report.completion_tokens
        if self._meters is not None:
            self._meters.count_turn(report)
        return report

    def _note_failure(self, error: BaseException) -> None:
        assert self._record is not None, "there is a record to note it in"
        reason, status = reason_of(error)
        self._record.failed = reason
        if not self._events and status in (409, 429, 503):
            self._record.rejected = reason
        if self._meters is None:
            return
        if status == 409:
            self._meters.conflicts.labels(reason).inc()
        if reason in ("disconnect", "cancelled", "shutting_down"):
            self._meters.cancelled.labels(reason).inc()
        if self._events:
            self._meters.rolled_back.labels(reason).inc()
        if isinstance(error, MemoryBreachError):
            self._meters.breaches.inc()


def reason_of(error: BaseException) -> tuple[str, int]:
    """Why a turn did not come to its end, in a word, and the status it is answered with."""
    if isinstance(error, DisconnectedError | GeneratorExit):
        return "disconnect", 499
    if isinstance(error, asyncio.CancelledError):
        error = ShuttingDownError()
    status = STATUSES.get(type(error)) if isinstance(error, Exception) else None
    return ("generation_failed", 500) if status is None else (status.code or "invalid_request", status.status)
