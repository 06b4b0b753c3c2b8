"""Log lines: one event a line, as JSON or for people; escaped, and without what users said."""

from __future__ import annotations

import datetime
import json
import logging
import traceback
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from fednl_runtime.server_api.observing.record import RequestRecord

Format: TypeAlias = Literal["json", "text"]
FRAMES = 8
"""Frames of a traceback that are told, the innermost."""

access = logging.getLogger("fednl_runtime.access")


def configure(format_: Format) -> None:
    """Send all log lines of this process to standard error: ours from INFO, those of libraries from WARNING."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format_ == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("fednl_runtime").setLevel(logging.INFO)


def log_start(facts: Mapping[str, Any]) -> None:
    """The line of a server that has begun to listen."""
    access.info("listening", extra={"fields": facts})


def log_request(record: RequestRecord) -> None:
    """The line of a request that was answered; routine looks at health and metrics are not told."""
    if record.route.startswith(("/health", "/metrics")) and record.status == 200:
        return
    fields = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "ms": round(1000 * record.seconds, 1),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }
    if code := record.rejected or record.failed:
        fields["code"] = code
    access.info("request", extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A JSON object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        return json.dumps(fields_of(record), default=str)


class TextLines(logging.Formatter):
    """Time, level and event, then name=value; nothing that a terminal would act on."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        fields = dict(fields_of(record))
        head = f"{fields.pop('time')} {fields.pop('level')} {fields.pop('event')}"
        line = " ".join([head, *(f"{name}={value}" for name, value in fields.items())])
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a line says, by name.

    Of an exception the type and the place are told, not the message: it may quote a prompt.
    """
    when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    fields = {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    error = record.exc_info[1] if record.exc_info else None
    return fields if error is None else {**fields, "error": type(error).__name__, "at": places(error)}


def places(error: BaseException) -> list[str]:
    """Where an exception came from, the innermost frame last."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
