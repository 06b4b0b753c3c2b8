"""OpenAI's routes: models, completions and chat completions."""

from __future__ import annotations

import asyncio
import dataclasses

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.engine import Engine
from fednl_runtime.errors import RequestError
from fednl_runtime.server_api.answering.answers import Plan, answer
from fednl_runtime.server_api.answering.chat import ChatShape
from fednl_runtime.server_api.answering.completions import CompletionShape
from fednl_runtime.server_api.answering.tasks import is_background_task
from fednl_runtime.server_api.answering.turn_of import turn_of
from fednl_runtime.server_api.errors import naming
from fednl_runtime.server_api.schemas.chat import ChatRequest
from fednl_runtime.server_api.schemas.completions import CompletionRequest, TurnFields
from fednl_runtime.server_api.served import Served, served_by
from fednl_runtime.turn import TurnRequest

router = APIRouter(prefix="/v1")


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
    plan = await completion_plan(served.engine, body, request)
    return await answer(served, plan, request, bool(body.stream))


@router.post("/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Read the messages, answer them, learn from both."""
    served = served_by(request)
    served.check_model(body.model)
    plan = await chat_plan(served, body, request)
    return await answer(served, plan, request, bool(body.stream))


async def completion_plan(engine: Engine, body: CompletionRequest, request: Request) -> Plan:
    """Check a completion request and make out its turns. Raises RequestError."""
    body.check_supported()
    prompts = body.prompts()
    n = body.choices(len(prompts))
    turn = turn_of(body, request, body.sampling(engine.limits.max_tokens), learn=True, mode="append")
    turn = dataclasses.replace(turn, score_prompt=bool(body.echo))
    tokens = await asyncio.to_thread(encode, engine, prompts)
    return plan_of(engine, Plan(turns_of(turn, tokens, n), CompletionShape(), n), body)


async def chat_plan(served: Served, body: ChatRequest, request: Request) -> Plan:
    """Check a chat request and make out its turns. Raises RequestError."""
    body.check_supported()
    messages, n = body.conversation(), body.choices()
    learn = not is_background_task(messages)
    params = body.sampling(served.template.stop, served.engine.limits.max_tokens)
    turn = turn_of(body, request, params, learn, mode="auto")
    with naming({"prompt": "messages"}):
        tokens = await asyncio.to_thread(lambda: encode(served.engine, [served.template.render(messages)]))
        return plan_of(served.engine, Plan(turns_of(turn, tokens, n), ChatShape(), n), body)


def turns_of(turn: TurnRequest, prompts: list[tuple[int, ...]], n: int) -> list[TurnRequest]:
    """`n` turns for each prompt, as `turn` says. Raises RequestError if several of them would learn."""
    if turn.writes and n * len(prompts) > 1:
        raise RequestError("A turn that learns has one prompt and one answer; set n to 1 or learn to false.", "n")
    return [dataclasses.replace(turn, prompt=prompt, choice=i) for prompt in prompts for i in range(n)]


def plan_of(engine: Engine, plan: Plan, body: TurnFields) -> Plan:
    """The plan with what all requests have in common. Raises RequestError if a turn cannot be served."""
    for turn in plan.turns:  # before the first one answers, so that a stream does not end in a refusal
        engine.check(turn)
    return dataclasses.replace(
        plan,
        include_usage=body.include_usage,
        return_progress=bool(body.return_progress),
        keep_partial=body.on_disconnect == "commit",
    )


def encode(engine: Engine, prompts: list[str] | list[list[int]]) -> list[tuple[int, ...]]:
    """Token ids of each prompt."""
    return [tuple(engine.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts]
