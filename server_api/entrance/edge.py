"""The outermost layer: which hosts are answered, what each request is called, and the note that is kept of it."""

from __future__ import annotations

import dataclasses
import ipaddress

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fednl_runtime.server_api.entrance.gate import Gate
from fednl_runtime.server_api.entrance.guard import Guard, Refused
from fednl_runtime.server_api.entrance.scopes import OPEN, RouteTable
from fednl_runtime.server_api.entrance.security import KeyRing
from fednl_runtime.server_api.errors import refusal
from fednl_runtime.server_api.observing.logs import log_request
from fednl_runtime.server_api.observing.metrics import Meters
from fednl_runtime.server_api.observing.record import CURRENT, RequestRecord, new_record

MAX_BODY_BYTES = 4 << 20
EXPOSED = ("x-request-id", "x-session-id", "x-session-version", "retry-after", "retry-after-ms", "idempotent-replay")
"""Headers of answers that a page of an allowed origin may read."""


@dataclasses.dataclass(frozen=True)
class EdgeOptions:
    """What the edge lets in."""

    keys: KeyRing = dataclasses.field(default_factory=KeyRing)
    allow_hosts: tuple[str, ...] = ()
    """Host names answered to besides those of this machine; with keys and none given, all are."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_file_bytes: int = MAX_BODY_BYTES
    """The same for a body that is a file."""
    rate: int | None = None
    """Requests a minute and key; None is any number."""


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(header: str) -> str:
    """The host in a Host header, without port and brackets."""
    return header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]


class Edge:
    """Names every request, refuses those that may not come in, and notes what became of each.

    Without a key only Host headers that name this machine are let in: otherwise any web page could
    reach the server by having its own name resolve to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, options: EdgeOptions, gate: Gate, meters: Meters) -> None:
        self.app, self.gate = app, gate
        self._options, self._meters, self._table = options, meters, RouteTable()
        self._guard = Guard(options.keys, gate, options.rate, options.max_body_bytes, options.max_file_bytes)
        self._inner: ASGIApp = self._admit
        if options.cors_origins:
            self._inner = CORSMiddleware(
                self._admit,
                allow_origins=options.cors_origins,
                allow_methods=["GET", "POST", "PATCH", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request here, pass on any other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = new_record(scope["method"], Headers(scope=scope).get("x-request-id", ""), self._meters)
        CURRENT.set(record)
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": record.request_id}}
        try:
            await self._answer(scope, receive, noting(send, record), record)
        except Exception:  # it was logged where it was answered
            if record.status is None:
                raise
        finally:
            self._meters.count_request(record)
            log_request(record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        if not self._knows_host(host_name(Headers(scope=scope).get("host", "localhost"))):
            record.rejected = "host_not_allowed"
            response = refusal(421, "The server does not answer to this host name; it can be told to by --allow-host.")
            await response(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    def _knows_host(self, host: str) -> bool:
        if len(self._options.keys) and not self._options.allow_hosts:
            return True
        return is_loopback(host) or host.lower() in self._options.allow_hosts

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        # HEAD is answered as GET is; the server sends no body for it.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found, record = self._table.find(method, scope["path"]), CURRENT.get()
        if found.rule is not None:
            record.route = found.rule.template
        admitted = self._guard.check(found, Headers(scope=scope))
        if isinstance(admitted, Refused):
            record.rejected = admitted.code
            await admitted.response(scope, receive, send)
            return
        scope["state"]["caller"] = admitted.caller
        scope["method"] = method
        if admitted.rule.scope == OPEN:
            await self.app(scope, receive, send)
            return
        with self.gate.passing():
            await self.app(scope, counting(receive, admitted.max_body_bytes), send)


def noting(send: Send, record: RequestRecord) -> Send:
    """`send` that names the answer by x-request-id and notes its status."""

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["x-request-id"] = record.request_id
            record.status = message["status"]
        await send(message)

    return noted


def counting(receive: Receive, max_bytes: int) -> Receive:
    """`receive` that raises 413 when the body is larger than `max_bytes`, whatever it says of itself."""
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise HTTPException(413, f"The body is larger than {max_bytes} bytes")
        return message

    return counted
