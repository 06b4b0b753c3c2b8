"""The requests that run now: each can be told to stop, by its client's leaving or by its owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

from starlette.requests import Request

from fednl_runtime.errors import CancelledTurnError
from fednl_runtime.server_api.errors import DisconnectedError, RequestNotFoundError
from fednl_runtime.server_api.served import owner_of

Stop: TypeAlias = "asyncio.Future[Exception]"
"""Done when a request is to stop; its result says why."""


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
            RequestNotFoundError: no request of that owner and id runs.
        """
        stops = self._stops.get((owner, request_id))
        if not stops:
            raise RequestNotFoundError(f"No request {request_id!r} is running; it may have ended.")
        for stop in stops:
            tell(stop, CancelledTurnError("The request was cancelled; its turn was rolled back."))


def tell(stop: Stop, why: Exception) -> None:
    """Stop a request, unless it is stopping already."""
    if not stop.done():
        stop.set_result(why)


@contextlib.asynccontextmanager
async def watching(request: Request) -> AsyncIterator[Stop]:
    """Done when the client of `request`, whose body was read, goes away, or when its owner cancels it."""
    stop: Stop = asyncio.get_running_loop().create_future()

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tell(stop, DisconnectedError())

    task = asyncio.create_task(until_gone())
    requests: RunningRequests = request.app.state.running
    try:
        with requests.listed(owner_of(request), request.state.request_id, stop):
            yield stop
    finally:
        task.cancel()
