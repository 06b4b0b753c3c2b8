"""Turns and event streams on the event loop; a request that is to stop rolls its turn back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fednl_runtime.engine import Engine, Event, Outcome
from fednl_runtime.errors import FednlError, ShuttingDownError
from fednl_runtime.server_api.answering.running import Stop
from fednl_runtime.server_api.errors import DisconnectedError, GenerationError, error_event, log
from fednl_runtime.server_api.observing.watch import TurnWatch
from fednl_runtime.turn import TurnRequest

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def sse(body: Mapping[str, Any]) -> bytes:
    """One server-sent event, in ASCII: many clients take U+0085 and U+2028 for the end of a line."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def turn_events(
    engine: Engine,
    turn_request: TurnRequest,
    stop: Stop,
    keep_alive_s: float,
    keep_partial: bool = False,
    see: Callable[[Any], None] = lambda event: None,
) -> AsyncGenerator[Event | None, None]:
    """The events of a turn and the report once it was committed; None after each `keep_alive_s` of silence.

    The turn commits when what follows its last token is asked for and `stop` was not told; with
    `keep_partial` also, with what it has, when its client leaves. `see` is called with each event as it
    comes, from the decode thread.

    Raises:
        DisconnectedError, CancelledTurnError: `stop` was told first; the turn was rolled back, or kept as said.
        ShuttingDownError: the server cancelled the request; the turn was rolled back.
    """
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(event: Any) -> None:
        watch.event(event)
        see(event)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(inbox.put_nowait, event)

    def keeps() -> bool:
        return keep_partial and isinstance(stop.why, DisconnectedError)

    def leave(why: Exception) -> None:
        if keeps():
            turn.wrap_up()
        else:
            inbox.put_nowait(why)

    with TurnWatch() as watch:
        turn = engine.start(turn_request, deliver)
        try:
            with stop.calling(leave):
                while not isinstance(event := await next_event(inbox, keep_alive_s), Outcome):
                    if not keeps():
                        yield event
                    await asyncio.sleep(0)  # others have their turn, and a disconnect is seen
                    if stop.why is not None and not keeps():
                        raise stop.why
                if stop.why is not None and not keeps():
                    raise stop.why
                if turn_request.writes:
                    stop.seal()
            report = watch.report(await asyncio.to_thread(turn.commit, event))
            if keeps():
                raise DisconnectedError
            yield report
        except asyncio.CancelledError as error:  # the time that a stopping server gives to open requests is over
            raise ShuttingDownError("The server is stopping; the turn was rolled back.") from error
        finally:
            turn.close()


async def next_event(inbox: asyncio.Queue[Any], keep_alive_s: float) -> Any:
    """What arrives next, None if nothing does in time; raises what is an exception, GenerationError if not ours."""
    try:
        async with asyncio.timeout(keep_alive_s):
            event = await inbox.get()
    except TimeoutError:
        return None
    if isinstance(event, (FednlError, DisconnectedError)):
        raise event
    if isinstance(event, Exception):
        log.error("a turn failed and was rolled back", exc_info=event)
        raise GenerationError("The model failed on this turn; the session is as it was before.")
    return event


class EventStream(StreamingResponse):
    """Server-sent events, of which the first is known: what fails earlier has a status of its own.

    Starlette's own class would leave the generator to the garbage collector when the client goes;
    here it is closed at once, and with it the turn.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(rest, headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; an error becomes its last event, without [DONE]."""
        async with contextlib.aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for chunk in self._rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except DisconnectedError:
                return
            except Exception as error:
                await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
