"""The gate: how many requests are at work, and whether more may come in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Gate:
    """Open until it is closed for good; of one event loop, safe to be closed from a signal handler."""

    def __init__(self) -> None:
        self.closed = False
        self.running = 0

    def close(self) -> None:
        """Let no more work in: the server is to stop."""
        self.closed = True

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
