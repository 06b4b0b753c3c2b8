"""HTTP/1.1 on a socket, by uvicorn, with an end to a server's patience."""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from fednl_runtime.server_api.errors import error_body


class Http11(H11Protocol):
    """Closes the connection of a client that takes too long to send a request, or to read what it asked for.

    The application sees that client leave, and rolls its turn back. What is no HTTP is answered in the
    shape of all errors.
    """

    arrival_s: ClassVar[float] = 60.0
    """Seconds within which a request must have come, from its first byte (or the connection's start) to its last."""
    stall_s: ClassVar[float] = 30.0
    """Seconds within which a client must make room for more of an answer, when its buffers are full."""

    _arrival: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._arrival = self.loop.call_later(self.arrival_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """A piece of a request has come."""
        super().data_received(data)
        if self._is_complete():
            stop(self._arrival)
            self._arrival = None
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.arrival_s, self.transport.abort)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is written to."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        stop(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        stop(self._arrival)
        stop(self._stall)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request."""
        body = json.dumps(error_body(msg, "invalid_request_error")).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def _is_complete(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete


def stop(timer: asyncio.TimerHandle | None) -> None:
    """Stop a timer, if there is one."""
    if timer is not None:
        timer.cancel()
