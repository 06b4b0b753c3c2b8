"""OpenAI's routes: models and completions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.engine import Engine
from fednl_runtime.errors import RequestError
from fednl_runtime.server_api.completions import ChoiceWriter, CompletionFrame, choice, session_object, usage
from fednl_runtime.server_api.errors import ModelNotFoundError
from fednl_runtime.server_api.schemas import CompletionRequest
from fednl_runtime.server_api.streaming import DONE, KEEP_ALIVE, EventStream, sse, turn_events, watching
from fednl_runtime.turn import TurnReport, TurnRequest

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
SESSION_HEADER = "x-session-id"

router = APIRouter(prefix="/v1")


@dataclasses.dataclass(frozen=True)
class Served:
    """What the routes serve."""

    engine: Engine
    model: str
    created: int
    keep_alive_s: float = 15.0

    def model_object(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "fednl-runtime"}

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless `name` is left out or the served model's."""
        if name not in (None, self.model):
            raise ModelNotFoundError(f"There is no model {name!r} here; this server has {self.model!r}.")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A completion request made out: its turns, in order of their choices."""

    turns: list[TurnRequest]
    n: int
    echo: bool
    include_usage: bool
    headers: dict[str, str]

    def writer(self, engine: Engine, turn: TurnRequest) -> ChoiceWriter:
        """The writer of one turn's choice."""
        return ChoiceWriter(engine.tokenizer, self.echo, turn.params.logprobs is not None)


@router.get("/models")
async def list_models(request: Request) -> Response:
    """The one model."""
    return JSONResponse({"object": "list", "data": [served_by(request).model_object()]})


@router.get("/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    """The model of that name."""
    served_by(request).check_model(name)
    return JSONResponse(served_by(request).model_object())


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Read the prompt, answer it, learn from both."""
    served = served_by(request)
    served.check_model(body.model)
    plan = await make_plan(served.engine, body, request)
    if not body.stream:
        return await whole_completion(served, plan, request)
    chunks = completion_chunks(served, plan, request)
    return EventStream(await anext(chunks), chunks, plan.headers)


def served_by(request: Request) -> Served:
    """What the application serves."""
    served: Served = request.app.state.served
    return served


def session_of(body: CompletionRequest, request: Request) -> str | None:
    """The session a request names: in the body, else in a header, else none. Raises RequestError."""
    session_id = body.session_id if body.session_id is not None else request.headers.get(SESSION_HEADER)
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise RequestError(
            "session_id must be 1 to 128 letters, digits or _.:- and begin with a letter or digit.", "session_id"
        )
    return session_id


async def make_plan(engine: Engine, body: CompletionRequest, request: Request) -> Plan:
    """Check a request and make out its turns. Raises RequestError."""
    body.check_supported()
    prompts = body.prompts()
    n = body.choices(len(prompts))
    turn = TurnRequest((), body.sampling(), session_of(body, request), body.learn is not False, bool(body.echo))
    if turn.writes and n * len(prompts) > 1:
        raise RequestError("A turn that learns has one prompt and one answer; set n to 1 or learn to false.", "n")
    tokens = await asyncio.to_thread(encode, engine, prompts)
    turns = [dataclasses.replace(turn, prompt=prompt, choice=i) for prompt in tokens for i in range(n)]
    for each in turns:  # before the first one answers, so that a stream does not end in a refusal
        engine.check(each)
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    headers = {} if turn.session_id is None else {SESSION_HEADER: turn.session_id}
    return Plan(turns, n, bool(body.echo), include_usage, headers)


def encode(engine: Engine, prompts: list[str] | list[list[int]]) -> list[tuple[int, ...]]:
    """Token ids of each prompt."""
    return [tuple(engine.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts]


async def whole_completion(served: Served, plan: Plan, request: Request) -> Response:
    """The answer in one piece; a client that leaves before it is made rolls its turn back."""
    choices, reports = [], []
    async with watching(request) as gone:
        for index, turn in enumerate(plan.turns):
            writer, pieces = plan.writer(served.engine, turn), []
            async with contextlib.aclosing(turn_events(served.engine, turn, gone, served.keep_alive_s)) as events:
                async for event in events:
                    if isinstance(event, TurnReport):
                        reports.append(event)
                    elif event is not None:
                        pieces.append(writer.write(event))
            if not turn.params.max_tokens:
                pieces.append(writer.finish_prompt())
            choices.append(choice(index, "".join(pieces), writer.logprobs(), reports[-1].finish_reason))
    body = CompletionFrame(served.model)(choices, usage=usage(reports, plan.n), session=session_object(reports[-1]))
    headers = {**plan.headers, "x-session-version": str(reports[-1].version)} if plan.headers else {}
    return JSONResponse(body, headers=headers)


async def completion_chunks(served: Served, plan: Plan, request: Request) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events; the chunk with a finish_reason tells what was committed."""
    frame, reports = CompletionFrame(served.model), []
    extra: dict[str, Any] = {"usage": None} if plan.include_usage else {}
    async with watching(request) as gone:
        for index, turn in enumerate(plan.turns):
            writer = plan.writer(served.engine, turn)
            async with contextlib.aclosing(turn_events(served.engine, turn, gone, served.keep_alive_s)) as events:
                async for event in events:
                    if event is None:
                        yield KEEP_ALIVE
                    elif isinstance(event, TurnReport):
                        reports.append(event)
                        text = "" if turn.params.max_tokens else writer.finish_prompt()
                        last = choice(index, text, writer.logprobs(), event.finish_reason)
                        yield sse(frame([last], session=session_object(event), **extra))
                    elif text := writer.write(event):
                        yield sse(frame([choice(index, text, writer.logprobs(), None)], **extra))
        if plan.include_usage:
            yield sse(frame([], usage=usage(reports, plan.n)))
        yield DONE
