"""OpenAI's own client against a running server: what it sends is understood, what it gets it can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from engines import ENDLESS, TOKENIZER, committed, until
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fednl_runtime.engine import Engine

PROMPT = "hello the other day"
HELLO: Any = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [(PROMPT, 1), ([PROMPT, "the"], 2), (TOKENIZER.encode(PROMPT), 1), ([TOKENIZER.encode(PROMPT), [5]], 2)],
)
def test_completions_take_the_four_kinds_of_prompt(client: openai.OpenAI, prompt: Any, answers: int) -> None:
    body = client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    assert isinstance(body, Completion)
    assert [choice.index for choice in body.choices] == list(range(answers))


def test_a_chat_is_read_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert isinstance(whole, ChatCompletion)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_the_clients_own_accumulator_makes_the_answer_out_of_a_stream(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 30}
    said = client.chat.completions.create(**fields, logit_bias=ENDLESS["logit_bias"]).choices[0].message.content
    with client.chat.completions.stream(**fields, **ENDLESS, stop=said[9:11], logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == said[: said.index(said[9:11])]


def test_the_asynchronous_client_streams_too(address: str) -> None:
    import asyncio

    async def said() -> str:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert isinstance(asyncio.run(said()), str)


def test_our_extras_come_back_on_the_answer_and_in_headers(client: openai.OpenAI) -> None:
    extra = {"session_id": "extras", "learn": True}
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=2, extra_body=extra)
    assert raw.headers["x-session-id"] == "extras"
    assert raw.headers["x-session-version"] == "1"
    assert raw.parse().model_extra["session"]["learned"] is True


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"extra_body": {"leran": False}}),
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.ConflictError, {"extra_body": {"session_id": "none", "session_version": 7}}),
    ],
)
def test_an_error_raises_the_clients_own_class(
    client: openai.OpenAI, error: type[openai.APIStatusError], fields: dict[str, Any]
) -> None:
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
    assert raised.value.request_id


def test_a_busy_session_is_tried_again_by_the_client_until_it_is_free(address: str, engine: Engine) -> None:
    body = {"prompt": "a", "max_tokens": 100, "session_id": "busy", **ENDLESS}
    engine.backend.delay_s = 0.01
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=5) as client,
        httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}) as answer,
    ):
        until(lambda: engine.scheduler._keys)
        raw = client.completions.with_raw_response
        answered = raw.create(model="tiny", prompt="b", max_tokens=1, extra_body={"session_id": "busy"})
        answer.read()
    engine.backend.delay_s = 0.0
    assert answered.retries_taken > 0
    assert answered.parse().model_extra["session"]["version"] == 2


class LosesFirstAnswers(httpx.HTTPTransport):
    """A connection that breaks after the server has answered, some times."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self._losses = losses

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; lose the answer."""
        response = super().handle_request(request)
        if self._losses:
            self._losses -= 1
            response.read()
            response.close()
            raise httpx.ReadError("the connection broke", request=request)
        return response


@pytest.fixture(name="unlucky")
def unlucky_fixture(address: str) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(transport=LosesFirstAnswers(2)) as http,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", http_client=http) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_sends_again_by_itself_is_learnt_once(
    unlucky: openai.OpenAI, engine: Engine, stream: bool
) -> None:
    name = f"unlucky-{stream}"
    raw = unlucky.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=4, stream=stream, extra_body={"session_id": name, **ENDLESS}
    )
    assert raw.retries_taken == 2
    answer = list(raw.parse())[-1] if stream else raw.parse()
    assert answer.model_extra["session"]["replayed"] is True
    assert committed(engine, name).version == 1


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fednl-runtime"
