"""What is noted of a request while it runs, for its line in the log and for the metrics; never its content."""

from __future__ import annotations

import contextvars
import dataclasses
import re
import time
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednl_runtime.server_api.observing.metrics import Meters

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
METHODS = ("GET", "POST", "PATCH", "DELETE", "PUT", "OPTIONS", "HEAD")


@dataclasses.dataclass
class RequestRecord:
    """One request: filled in on its way through the house."""

    request_id: str
    method: str
    meters: Meters | None = None
    """The metrics in which its turns are counted."""
    route: str = "other"
    """Template of its path; "other" if that leads nowhere."""
    status: int | None = None
    rejected: str | None = None
    """Code of the error with which it was refused before it did anything."""
    failed: str | None = None
    """Why a turn of it did not come to its end; a stream tells it when its status has been sent long since."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    began: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time since the request began."""
        return time.perf_counter() - self.began


CURRENT: contextvars.ContextVar[RequestRecord] = contextvars.ContextVar("fednl_runtime_request")
"""The record of the request that this task answers."""


def new_record(method: str, given_id: str, meters: Meters | None) -> RequestRecord:
    """A record under the id that the client gave, if that is harmless, else under a new one."""
    request_id = given_id if REQUEST_ID.fullmatch(given_id) else f"req_{uuid.uuid4().hex}"
    return RequestRecord(request_id, method if method in METHODS else "other", meters)
