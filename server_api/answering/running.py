"""The requests that run now: each can be told to stop, by its client's leaving or by its owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.requests import Request

from fednl_runtime.errors import CancelledTurnError
from fednl_runtime.server_api.errors import DisconnectedError, RequestNotFoundError
from fednl_runtime.server_api.served import owner_of


class Stop:
    """Whether a request is to stop, and why; of one event loop."""

    def __init__(self) -> None:
        self.why: Exception | None = None
        self._sealed = False
        self._listeners: list[Callable[[Exception], None]] = []

    def tell(self, why: Exception) -> bool:
        """Stop the request unless it is sealed, or is stopping already; say whether it stops."""
        if self._sealed:
            return False
        if self.why is None:
            self.why = why
            for listener in self._listeners:
                listener(why)
        return True

    def seal(self) -> None:
        """Nothing stops the request any more: it commits."""
        self._sealed = True

    @contextlib.contextmanager
    def calling(self, listener: Callable[[Exception], None]) -> Iterator[None]:
        """Call `listener` with the reason when the request is to stop, at once if it is already."""
        if self.why is not None:
            listener(self.why)
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


class RunningRequests:
    """The requests that run, by owner and request id; of one event loop."""

    def __init__(self) -> None:
        self._stops: dict[tuple[str, str], set[Stop]] = {}

    @contextlib.contextmanager
    def listed(self, owner: str, request_id: str, stop: Stop) -> Iterator[None]:
        """List a request for as long as the block runs."""
        name = owner, request_id
        self._stops.setdefault(name, set()).add(stop)
        try:
            yield
        finally:
            self._stops[name].discard(stop)
            if not self._stops[name]:
                del self._stops[name]

    def cancel(self, owner: str, request_id: str) -> None:
        """Stop a request and roll its turn back; if a client gave one id to several, all of them.

        Raises:
            RequestNotFoundError: no request of that owner and id runs, or it is past its last token.
        """
        why = CancelledTurnError("The request was cancelled; its turn was rolled back.")
        stopped = [stop.tell(why) for stop in self._stops.get((owner, request_id), ())]
        if not any(stopped):
            raise RequestNotFoundError("No request of that id is running; it may have ended.")


@contextlib.asynccontextmanager
async def watching(request: Request) -> AsyncIterator[Stop]:
    """Told to stop when the client of `request`, whose body was read, goes away, or when its owner cancels it."""
    stop = Stop()

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stop.tell(DisconnectedError())

    task = asyncio.create_task(until_gone())
    requests: RunningRequests = request.app.state.running
    try:
        with requests.listed(owner_of(request), request.state.request_id, stop):
            yield stop
    finally:
        task.cancel()
