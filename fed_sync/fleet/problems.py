"""What a refusal looks like over HTTP: one table of codes, one shape (RFC 9457)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from fednl_runtime.fed_sync.errors import BlobError, DatabaseError, Refusal

log = logging.getLogger("fednl_runtime")

STATUSES: Mapping[str, int] = {
    "malformed": 422,
    "wrong_schema": 422,
    "wrong_names": 422,
    "wrong_dtype": 422,
    "wrong_shape": 422,
    "not_finite": 422,
    "bad_count": 422,
    "norm_absurd": 422,
    "bad_update_id": 422,
    "bad_key": 422,
    "id_reused": 422,
    "digest_mismatch": 400,
    "bad_signature": 401,
    "clock_skew": 401,
    "bad_token": 401,
    "bad_admin_token": 401,
    "revoked": 403,
    "unknown_population": 404,
    "unknown_version": 404,
    "unknown_update": 404,
    "unknown_device": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "stale_base": 409,
    "unknown_base": 409,
    "device_already_contributed": 409,
    "key_in_use": 409,
    "paused": 409,
    "too_few_updates": 409,
    "privacy_budget_spent": 409,
    "not_published": 409,
    "not_quarantined": 409,
    "withdrawn": 410,
    "update_id_expired": 410,
    "too_large": 413,
    "unsupported_media_type": 415,
    "agent_too_old": 426,
    "internal_error": 500,
    "unavailable": 503,
}
"""Every code of the protocol and its status."""

BY_STATUS = {404: "not_found", 405: "method_not_allowed"}


def problem(code: str, detail: str, next_sync: Mapping[str, int], current_version: int | None = None) -> Response:
    """An answer of type application/problem+json."""
    status = STATUSES[code]
    body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    body |= {"code": code, "detail": detail, "next_sync": dict(next_sync)}
    if current_version is not None:
        body["current_version"] = current_version
    headers = {"retry-after": str(next_sync["min_s"])} if status == 503 else {}
    return Response(json.dumps(body), status, headers, media_type="application/problem+json")


def problem_of(error: Exception, next_sync: Mapping[str, int]) -> Response:
    """The answer to a request that failed; what is not ours to explain is logged and not shown."""
    if isinstance(error, Refusal):
        return problem(error.code, str(error), next_sync, error.current_version)
    if isinstance(error, HTTPException):
        code = BY_STATUS.get(error.status_code, "malformed")
        return problem(code, f"{error.detail}. See docs/federation.md for the routes.", next_sync)
    log.error("a request failed", exc_info=error)
    if isinstance(error, DatabaseError | BlobError | OSError):
        return problem("unavailable", "The server's storage does not work at the moment. Come back later.", next_sync)
    return problem("internal_error", "The server failed to answer; its log says why.", next_sync)
