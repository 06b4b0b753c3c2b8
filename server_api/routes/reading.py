"""Routes that read a text with a session: learn it, or score it and keep nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fednl_runtime.engine import Engine
from fednl_runtime.records import Record
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.server_api.answering.answers import session_object
from fednl_runtime.server_api.answering.running import Stop, watching
from fednl_runtime.server_api.answering.streaming import DONE, KEEP_ALIVE, EventStream, sse, turn_events
from fednl_runtime.server_api.answering.turn_of import SESSION_HEADER, retry_of
from fednl_runtime.server_api.answering.writer import name_of
from fednl_runtime.server_api.errors import json_answer, naming
from fednl_runtime.server_api.observing.timings import Stopwatch
from fednl_runtime.server_api.routes.sessions import key_of, store_of
from fednl_runtime.server_api.schemas.completions import Learn
from fednl_runtime.server_api.schemas.sessions import IngestRequest, ScoreRequest, TextRequest
from fednl_runtime.server_api.served import Served, served_by
from fednl_runtime.turn import PromptEvent, TurnReport, TurnRequest

router = APIRouter(prefix="/v1/sessions")
READ_ONLY = SamplingParams(max_tokens=0)


@router.post("/{session_id}/ingest")
async def ingest(session_id: str, body: IngestRequest, request: Request) -> Response:
    """Learn a text and generate nothing; as a stream, tell how far it is and how surprising it was."""
    served = served_by(request)
    turn = dataclasses.replace(
        await turn_on(session_id, body, request),
        expect_version=body.session_version,
        retry=retry_of(body, request),
    )
    answers = ingest_answers(served, turn, request, body.on_disconnect == "commit")
    if body.stream:
        events = ingest_events(answers)
        return EventStream(await anext(events), events, {SESSION_HEADER: session_id})
    async with contextlib.aclosing(answers):
        answer = [answer async for answer in answers if answer is not None][-1]
    headers = {SESSION_HEADER: session_id, "x-session-version": str(answer["session"]["version"])}
    return json_answer(answer, 200, headers)


@router.post("/{session_id}/score")
async def score(session_id: str, body: ScoreRequest, request: Request) -> Response:
    """Surprise of each token of a text, for a memory that learns from it as it goes and for one that does not."""
    engine = served_by(request).engine
    turn = await turn_on(session_id, body, request)
    record = await asyncio.to_thread(store_of(request).get, key_of(session_id, request))
    arms: dict[str, Any] = {}
    async with watching(request) as stop:
        for arm in dict.fromkeys(body.arms):
            learn: Learn = "dry_run" if arm == "learning" else False
            scored = dataclasses.replace(turn, learn=learn, expect_version=record.head.version)
            arms[arm] = await score_arm(served_by(request), scored, stop)
    return json_answer(score_object(engine, record, turn, arms), 200, {SESSION_HEADER: session_id})


async def turn_on(session_id: str, body: TextRequest, request: Request) -> TurnRequest:
    """The turn that reads a text on a session that exists. Raises SessionNotFoundError, RequestError."""
    engine, key = served_by(request).engine, key_of(session_id, request)
    await asyncio.to_thread(store_of(request).get, key)
    content = body.content()
    with naming({"prompt": "text" if isinstance(content, str) else "tokens"}):
        encoded = await asyncio.to_thread(engine.tokenizer.encode, content) if isinstance(content, str) else content
        turn = TurnRequest(tuple(encoded), READ_ONLY, key.id, owner=key.owner, request_id=request.state.request_id)
        engine.check(turn)
    return turn


async def ingest_answers(
    served: Served, turn: TurnRequest, request: Request, keep_partial: bool
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """How far a turn has read, after each piece, and what it did to its session; None after each silence."""
    watch, total = Stopwatch(), len(turn.prompt)
    async with (
        watching(request) as stop,
        contextlib.aclosing(turn_events(served.engine, turn, stop, served.keep_alive_s, keep_partial)) as events,
    ):
        async for event in events:
            watch.see(event)
            if isinstance(event, PromptEvent):
                progress = {**watch.progress(total), "surprise": mean(event.logprobs)}
                yield {"object": "session.ingest.progress", **progress}
            elif isinstance(event, TurnReport):
                yield {
                    "object": "session.ingest",
                    "tokens": event.prompt_tokens,
                    "session": session_object(event),
                    "timings": watch.timings(event),
                }
            elif event is None:
                yield None


async def ingest_events(answers: AsyncGenerator[dict[str, Any] | None, None]) -> AsyncGenerator[bytes, None]:
    """The same as server-sent events."""
    async with contextlib.aclosing(answers):
        async for answer in answers:
            yield KEEP_ALIVE if answer is None else sse(answer)
    yield DONE


async def score_arm(served: Served, turn: TurnRequest, stop: Stop) -> dict[str, Any]:
    """Surprise of each token of a turn that nothing is kept of, None where nothing came before, and their mean."""
    logprobs: list[float | None] = []
    async with contextlib.aclosing(turn_events(served.engine, turn, stop, served.keep_alive_s)) as events:
        async for event in events:
            if isinstance(event, PromptEvent):
                logprobs += event.logprobs
    return {"mean": mean(logprobs), "surprise": [None if p is None else -p for p in logprobs]}


def mean(logprobs: Sequence[float | None]) -> float | None:
    """Mean surprise in nats of the tokens that had a prediction, None if none had."""
    known = [-p for p in logprobs if p is not None]
    return sum(known) / len(known) if known else None


def score_object(engine: Engine, record: Record, turn: TurnRequest, arms: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for scores."""
    pieces = [name_of(engine.tokenizer.token_bytes(token)) for token in turn.prompt]
    version = {"id": record.key.id, "version": record.head.version}
    return {"object": "session.score", "session": version, "tokens": turn.prompt, "pieces": pieces, "arms": arms}
