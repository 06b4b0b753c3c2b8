"""The outermost layer: who may come in, how much they may send, and the name of each request."""

from __future__ import annotations

import hmac
import ipaddress
import uuid

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fednl_runtime.server_api.errors import refusal

OPEN_PATHS = ("/health",)
"""Paths that need no key."""


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
    """Checks key, host and size before the application runs, and names every answer by x-request-id.

    Without a key only Host headers that name this machine are let in: otherwise any web page could
    reach the server by having its own name resolve to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self.app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request here, pass on any other."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        refused = self._refused(scope["path"], Headers(scope=scope))
        if refused is not None:
            await refused(scope, receive, send_named)
        else:
            await self.app(scope, self._counting(receive), send_named)

    def _refused(self, path: str, headers: Headers) -> Response | None:
        if self._api_key is None and not is_loopback(host_name(headers.get("host", "localhost"))):
            return refusal(421, "Without an API key this server answers to the names of its own machine only.")
        if self._api_key is not None and path not in OPEN_PATHS and not self._key_fits(headers):
            return refusal(401, "The API key is missing or wrong.", {"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return refusal(413, f"The body is larger than {self._max_body_bytes} bytes.")
        return None

    def _key_fits(self, headers: Headers) -> bool:
        assert self._api_key is not None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)

    def _counting(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, f"The body is larger than {self._max_body_bytes} bytes")
            return message

        return counted
