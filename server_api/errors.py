"""What an error looks like over HTTP: one table, one shape."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fednl_runtime import errors
from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.schemas.completions import KINDS

log = logging.getLogger("fednl_runtime")


class ModelNotFoundError(FednlError):
    """The request names a model that is not served here."""


class RequestNotFoundError(FednlError):
    """No such request is running for this caller."""


class StateFileError(FednlError):
    """A file that was sent to become a session cannot: it is damaged, or belongs to another model."""


class SyncOffError(FednlError):
    """The server takes part in no federation."""


class GenerationError(FednlError):
    """The model failed on a turn, which was rolled back; the log says how."""


class DisconnectedError(Exception):
    """The client went away; nobody will read the answer."""


@dataclasses.dataclass(frozen=True)
class Status:
    """How a class of errors is answered. `retry` tells clients that retry by themselves whether to."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    retry: bool | None = None

    def headers(self) -> dict[str, str]:
        """Headers for clients that retry."""
        if self.retry is None:
            return {}
        return retry_headers(1) if self.retry else {"x-should-retry": "false"}


def retry_headers(seconds: float) -> dict[str, str]:
    """Headers that ask a client to try again in so many seconds."""
    whole, exact = str(math.ceil(seconds)), str(math.ceil(1000 * seconds))
    return {"retry-after": whole, "retry-after-ms": exact, "x-should-retry": "true"}


STATUSES: Mapping[type[Exception], Status] = {
    errors.RequestError: Status(400),
    ModelNotFoundError: Status(404, code="model_not_found"),
    StateFileError: Status(400, code="state_unusable"),
    errors.RetryMismatchError: Status(400, code="idempotency_mismatch"),
    errors.SessionNotFoundError: Status(404, code="session_not_found"),
    errors.SnapshotNotFoundError: Status(404, code="snapshot_not_found"),
    errors.SessionExistsError: Status(409, code="session_exists", retry=False),
    errors.StateError: Status(409, code="state_unusable", retry=False),
    errors.VersionConflictError: Status(409, code="session_version_conflict", retry=False),
    RequestNotFoundError: Status(404, code="request_not_found"),
    SyncOffError: Status(409, code="sync_off", retry=False),
    errors.CancelledTurnError: Status(409, code="cancelled", retry=False),
    errors.AnswerGoneError: Status(409, code="answer_gone", retry=False),
    errors.SessionBusyError: Status(409, code="session_busy", retry=True),
    errors.QueueFullError: Status(429, "rate_limit_error", "queue_full", retry=True),
    errors.SessionLimitError: Status(429, "rate_limit_error", "session_limit", retry=False),
    errors.MemoryBreachError: Status(500, "server_error", "memory_breach", retry=False),
    GenerationError: Status(500, "server_error", "generation_failed", retry=False),
    errors.StoreError: Status(503, "server_error", "store_unavailable", retry=True),
    errors.ShuttingDownError: Status(503, "server_error", "shutting_down", retry=True),
}
INTERNAL = Status(500, "server_error", "internal_error", retry=False)
CODES = {
    401: "invalid_api_key",
    403: "insufficient_scope",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    421: "host_not_allowed",
    429: "rate_limited",
}
REFUSAL_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def describe(error: Exception) -> tuple[Status, dict[str, Any]]:
    """Status and body of an error; one that is not ours is logged and not shown."""
    status = STATUSES.get(type(error), INTERNAL)
    if isinstance(error, FednlError):
        return status, error_body(str(error), status.type, getattr(error, "param", None), status.code)
    log.error("a request failed", exc_info=error)
    return status, error_body("The server failed to answer; its log says why.", status.type, None, status.code)


@contextlib.contextmanager
def naming(params: Mapping[str, str]) -> Iterator[None]:
    """Give a RequestError that names a parameter of the engine the name that the request has for it."""
    try:
        yield
    except errors.RequestError as error:
        error.param = params.get(error.param or "", error.param)
        raise


def json_answer(body: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body in ASCII: what a client sent may not be encodable otherwise."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """The whole answer to a request that failed before anything was sent."""
    status, body = describe(error)
    return json_answer(body, status.status, status.headers())


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that HTTP itself refuses."""
    type_ = REFUSAL_TYPES.get(status, "invalid_request_error")
    return json_answer(error_body(message, type_, None, CODES.get(status)), status, headers)


def validation_response(error: RequestValidationError) -> Response:
    """400 with the first field that is wrong, in one sentence."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    field = path[0] if path and first["type"] != "json_invalid" else None
    if first["type"] == "extra_forbidden":
        message = f"Unknown field {'.'.join(path)}; check its spelling."
    elif field in KINDS:
        message = f"{field} must be {KINDS[field]}."
    elif field is None:
        message = f"The body is not a JSON object ({first['msg']})."
    else:
        message = f"{field}: {first['msg']}."
    return json_answer(error_body(message, "invalid_request_error", field), 400)


def add_handlers(app: FastAPI) -> None:
    """Give every failure of `app` the same shape."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refusal(error.status_code, f"{error.detail}.", error.headers)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_response(error)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(DisconnectedError, on_disconnect)
    app.add_exception_handler(FednlError, on_error)


def error_event(error: Exception) -> bytes:
    """The event that ends a stream which failed after it began."""
    return b"data: " + json.dumps(describe(error)[1]).encode() + b"\n\n"
