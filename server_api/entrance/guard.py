"""Whether a request may come in: its key, its route, its scope, its rate, and what its body is said to be."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response

from fednl_runtime.errors import ShuttingDownError
from fednl_runtime.server_api.entrance.gate import Gate
from fednl_runtime.server_api.entrance.rate import RateLimit
from fednl_runtime.server_api.entrance.scopes import METRICS, OPEN, Found, Rule
from fednl_runtime.server_api.entrance.security import Caller, KeyRing
from fednl_runtime.server_api.errors import CODES, error_response, refusal, retry_headers

JSON = re.compile(r"application/(json|[\w.+-]+\+json)")
OCTETS = re.compile(r"application/octet-stream")


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A request that may come in: by whose key, by which row of the table, and the largest body it may have."""

    caller: Caller | None
    rule: Rule
    max_body_bytes: int


@dataclasses.dataclass(frozen=True)
class Refused:
    """A request that may not come in: the answer to it, and that answer's code."""

    code: str
    response: Response


class Guard:
    """Checks requests in the order in which a stranger should learn of them: nothing before the key."""

    def __init__(self, keys: KeyRing, gate: Gate, rate: int | None, max_body_bytes: int, max_file_bytes: int) -> None:
        self._keys, self._gate = keys, gate
        self._rate = None if rate is None else RateLimit(rate)
        self._max_body_bytes, self._max_file_bytes = max_body_bytes, max_file_bytes

    def check(self, found: Found, headers: Headers) -> Admitted | Refused:
        """The request admitted, or the answer that refuses it."""
        rule, caller = found.rule, self._keys.caller(secret_of(headers))
        if rule is not None and rule.scope == OPEN:
            return Admitted(caller, rule, 0)
        if caller is None:
            return refused(401, "The API key is missing or wrong.", {"www-authenticate": "Bearer"})
        if rule is None:
            return no_route(found)
        admitted = Admitted(caller, rule, self._max_file_bytes if rule.octets else self._max_body_bytes)
        return self._refused(rule, caller) or refused_body(admitted, headers) or admitted

    def _refused(self, rule: Rule, caller: Caller) -> Refused | None:
        if rule.scope not in caller.scopes:
            return refused(403, f"This API key is not good for the scope {rule.scope!r}; use one that is.")
        if rule.scope == METRICS:
            return None
        if self._gate.closed:
            stopping = ShuttingDownError("The server is stopping; send the request later, or to another one.")
            return Refused("shutting_down", error_response(stopping))
        wait = self._rate.wait_s(caller.key_id) if self._rate else 0
        if wait:
            return refused(429, f"Too many requests with this API key; wait {wait:.1f} s.", retry_headers(wait))
        return None


def refused_body(admitted: Admitted, headers: Headers) -> Refused | None:
    """The answer to a body that is of another kind, or says that it is larger, than it may be."""
    rule, max_bytes = admitted.rule, admitted.max_body_bytes
    length = headers.get("content-length", "0")
    has_body = "transfer-encoding" in headers or length.strip("0") != ""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and not (OCTETS if rule.octets else JSON).fullmatch(media):
        kind = "application/octet-stream" if rule.octets else "application/json"
        return refused(415, f"The body is not said to be what it must be; send the header Content-Type: {kind}.")
    if length.isdecimal() and int(length) > max_bytes:
        return refused(413, f"The body is larger than {max_bytes} bytes.")
    return None


def refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> Refused:
    """A refusal with the code that its status has."""
    return Refused(CODES[status], refusal(status, message, headers))


def secret_of(headers: Headers) -> bytes:
    """The API key that a request brings, as `Authorization: Bearer` or as `X-Api-Key`; empty if it brings none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        secret = headers.get("x-api-key", "")
    return secret.strip().encode("latin-1")


def no_route(found: Found) -> Refused:
    """The answer to a path that leads nowhere, or does so with this method."""
    if found.methods:
        return refused(405, "The path has no such method.", {"allow": ", ".join(found.methods)})
    return refused(404, "There is no such path.")
