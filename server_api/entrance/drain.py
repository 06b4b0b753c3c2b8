"""A server that stops in order: no new work, time for what runs, then an end to it."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from types import FrameType

import uvicorn

from fednl_runtime.server_api.entrance.edge import Edge
from fednl_runtime.server_api.entrance.transport import Http11

LAST_WORDS_S = 1
"""Seconds for requests that were told to stop to say so to their clients."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: more than clients keep it, so that none sends into one that just closed."""


class DrainingServer(uvicorn.Server):
    """On the first signal it closes its gate and waits for running requests, on the second it waits no longer."""

    def __init__(self, app: Edge, drain_s: float, tls: tuple[Path, Path] | None = None) -> None:
        certificate, key = tls or (None, None)
        config = uvicorn.Config(
            app,
            http=Http11,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        super().__init__(config)
        self._gate, self._drain_s = app.gate, drain_s
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; when that has begun, hurry."""
        self._deadline = 0.0 if self._gate.closed else time.monotonic() + self._drain_s
        self._gate.close()

    async def on_tick(self, counter: int) -> bool:
        """Whether the server is to end now."""
        late = self._gate.closed and time.monotonic() >= self._deadline
        if late:
            for task in self.server_state.tasks:
                task.cancel()
        drained = self._gate.closed and not self._gate.running
        return late or drained or await super().on_tick(counter)


def run(app: Edge, sock: socket.socket, drain_s: float, tls: tuple[Path, Path] | None = None) -> None:
    """Serve on `sock`, with TLS by a certificate and its key, until SIGINT or SIGTERM has been obeyed."""
    DrainingServer(app, drain_s, tls).run(sockets=[sock])
    for number in (signal.SIGINT, signal.SIGTERM):  # what is left to do takes moments
        signal.signal(number, signal.SIG_IGN)
