"""Answers out of turns: in one piece or as server-sent events, for completions and chats alike."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.engine import Engine, Event
from fednl_runtime.server_api.answering.running import Stop, watching
from fednl_runtime.server_api.answering.streaming import DONE, KEEP_ALIVE, EventStream, sse, turn_events
from fednl_runtime.server_api.answering.turn_of import SESSION_HEADER
from fednl_runtime.server_api.answering.writer import ChoiceWriter, Scored
from fednl_runtime.server_api.observing.timings import Stopwatch
from fednl_runtime.server_api.served import Served
from fednl_runtime.turn import PromptEvent, TurnReport, TurnRequest


class Names(NamedTuple):
    """What an answer's id begins with, and what a whole one and a chunk of one call themselves."""

    prefix: str
    whole: str
    chunk: str


class Shape(Protocol):
    """How OpenAI writes an answer."""

    names: Names

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its text."""

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
        """A piece of a choice."""

    def whole(self, index: int, text: str, scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
        """A whole choice."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request made out: its turns, in order of their choices, and how they are told."""

    turns: Sequence[TurnRequest]
    shape: Shape
    n: int = 1
    """Answers to each prompt."""
    include_usage: bool = False
    return_progress: bool = False
    keep_partial: bool = False
    """Whether a turn whose client leaves is committed with what it has, not rolled back."""

    @property
    def headers(self) -> dict[str, str]:
        """The name of the session, for clients that see no fields of ours."""
        session_id = self.turns[0].session_id
        return {} if session_id is None else {SESSION_HEADER: session_id}

    def writer(self, engine: Engine, turn: TurnRequest) -> ChoiceWriter:
        """The writer of one turn's choice."""
        return ChoiceWriter(engine.tokenizer, turn.score_prompt, turn.params.logprobs is not None)


def usage(reports: Sequence[TurnReport], n: int) -> dict[str, Any]:
    """Tokens of a request; a prompt counts once, whatever the number of its answers."""
    prompt = sum(report.prompt_tokens for report in reports[::n])
    completion = sum(report.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(report.cached_tokens for report in reports[::n])},
    }


def session_object(report: TurnReport) -> dict[str, Any]:
    """What the turn did to its session."""
    return {
        "id": report.session_id,
        "version": report.version,
        "parent_version": report.parent_version,
        "tokens_seen": report.tokens_seen,
        "learned": report.learned,
        "update_norm": report.update_norm,
        "surprise": report.surprise,
        "state_bytes": report.state_bytes,
        "persisted": report.persisted,
        "replayed": report.replayed,
    }


def frame(names: Names, model: str, streamed: bool) -> dict[str, Any]:
    """What all chunks of one answer share."""
    return {
        "id": f"{names.prefix}-{uuid.uuid4().hex}",
        "object": names.chunk if streamed else names.whole,
        "created": int(time.time()),
        "model": model,
    }


async def answer(served: Served, plan: Plan, request: Request, stream: bool) -> Response:
    """The answer to a request, whole or as a stream."""
    if not stream:
        return await whole_answer(served, plan, request)
    chunks = answer_chunks(served, plan, request)
    return EventStream(await anext(chunks), chunks, plan.headers)


def events_of(
    served: Served, plan: Plan, turn: TurnRequest, stop: Stop, watch: Stopwatch
) -> AsyncGenerator[Event | None, None]:
    """The events of one turn of a plan, timed by `watch`."""
    return turn_events(served.engine, turn, stop, served.keep_alive_s, plan.keep_partial, watch.see)


async def whole_answer(served: Served, plan: Plan, request: Request) -> Response:
    """The answer in one piece; a client that leaves before it is made rolls its turn back."""
    choices, reports, timings = [], [], dict[str, Any]()
    async with watching(request) as stop:
        for index, turn in enumerate(plan.turns):
            writer, pieces, watch = plan.writer(served.engine, turn), [], Stopwatch()
            async with contextlib.aclosing(events_of(served, plan, turn, stop, watch)) as events:
                async for event in events:
                    if isinstance(event, TurnReport):
                        reports.append(event)
                    elif event is not None:
                        pieces.append(writer.write(event))
            if not turn.params.max_tokens:
                pieces.append(writer.finish_prompt())
            timings = watch.timings(reports[-1])
            choices.append(plan.shape.whole(index, "".join(pieces), writer.scored(), reports[-1].finish_reason))
    body = {
        **frame(plan.shape.names, served.model, streamed=False),
        "choices": choices,
        "usage": usage(reports, plan.n),
        "session": session_object(reports[-1]),
        "timings": timings,
    }
    return JSONResponse(body, headers={**plan.headers, **outcome_headers(reports[-1])})


def outcome_headers(report: TurnReport) -> dict[str, str]:
    """What became of the session, for clients that see no fields of ours."""
    headers = {} if report.session_id is None else {"x-session-version": str(report.version)}
    return headers | ({"idempotent-replay": "true"} if report.replayed else {})


async def answer_chunks(served: Served, plan: Plan, request: Request) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events; the chunk with a finish_reason tells what was committed."""
    shared, reports = frame(plan.shape.names, served.model, streamed=True), list[TurnReport]()
    if plan.include_usage:
        shared["usage"] = None
    async with watching(request) as stop:
        for index, turn in enumerate(plan.turns):
            async with contextlib.aclosing(choice_chunks(served, plan, index, turn, stop)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, TurnReport):
                        reports.append(chunk)
                    else:
                        yield KEEP_ALIVE if chunk is None else sse({**shared, **chunk})
        if plan.include_usage:
            yield sse({**shared, "choices": [], "usage": usage(reports, plan.n)})
        yield DONE


async def choice_chunks(
    served: Served, plan: Plan, index: int, turn: TurnRequest, stop: Stop
) -> AsyncGenerator[dict[str, Any] | TurnReport | None, None]:
    """What the chunks of one choice say, then the report of its turn; None after each silence."""
    writer, watch, shape = plan.writer(served.engine, turn), Stopwatch(), plan.shape
    opening = shape.opening(index)
    async with contextlib.aclosing(events_of(served, plan, turn, stop, watch)) as events:
        async for event in events:
            chunk = chunk_of(event, turn, index, plan, writer, watch)
            if chunk is not None and opening is not None:
                # Not before there is something to say: what fails earlier has a status of its own.
                yield {"choices": [opening]}
                opening = None
            if chunk is not None or event is None:
                yield chunk
            if isinstance(event, TurnReport):
                yield event


def chunk_of(
    event: Event | None, turn: TurnRequest, index: int, plan: Plan, writer: ChoiceWriter, watch: Stopwatch
) -> dict[str, Any] | None:
    """What a chunk says of an event, None if nothing."""
    if event is None:
        return None
    if isinstance(event, TurnReport):
        text = "" if turn.params.max_tokens else writer.finish_prompt()
        last = plan.shape.piece(index, text, writer.scored(), event.finish_reason)
        return {"choices": [last], "session": session_object(event), "timings": watch.timings(event)}
    text, more = writer.write(event), {}
    if plan.return_progress and isinstance(event, PromptEvent):
        more["prompt_progress"] = watch.progress(len(turn.prompt))
    return {"choices": [plan.shape.piece(index, text, writer.scored(), None)], **more} if text or more else None
