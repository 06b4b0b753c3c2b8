"""The OpenAPI document is true: schemathesis makes requests out of it and holds every answer against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
import schemathesis
from engines import running_engine
from hypothesis import HealthCheck, given, settings
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from fednl_runtime.engine import EngineLimits
from fednl_runtime.server_api.entrance import scopes
from fednl_runtime.server_api.entrance.security import key_ring
from fednl_runtime.server_api.openapi import ANSWERS, operations
from fednl_runtime.server_api.schemas.answers import ChatChunk, CompletionChunk, ErrorAnswer
from fednl_runtime.server_api.schemas.session_answers import Ingested, IngestProgress

LIMITS = EngineLimits(slots=2, queue=8, max_prompt_tokens=60, max_tokens=6)
KEY = {"authorization": "Bearer secret"}
EXCLUDED = [positive_data_acceptance, ignored_auth]
"""A schema cannot say that a token id must be the model's; every route without a key is walked in test_security.py."""


@pytest.fixture(name="small", scope="module")
def small_fixture(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with running_engine(LIMITS) as engine, serve(engine, keys=key_ring("secret", None)) as address:
        yield address


@pytest.fixture(name="told", scope="module")
def told_fixture(small: str) -> dict[str, Any]:
    return httpx.get(f"{small}/openapi.json", headers=KEY).json()


@pytest.fixture(name="schema", scope="module")
def schema_fixture(small: str) -> Any:
    return schemathesis.openapi.from_url(f"{small}/openapi.json", headers=KEY)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_is_one_that_the_document_tells_of(
    small: str, schema: Any, name: str, mode: GenerationMode
) -> None:
    method, path = name.split()
    operation = schema[path][method.lower()]
    if mode is GenerationMode.NEGATIVE and not (operation.body or list(operation.iter_parameters())):
        pytest.skip("nothing is sent that could be wrong")

    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and "session_id" in case.path_parameters:
            turn = {"prompt": "a", "max_tokens": 1, "session_id": "kept"}
            httpx.post(f"{small}/v1/completions", json=turn, headers=KEY)
            case.path_parameters["session_id"] = "kept"
        case.call_and_validate(headers=KEY, excluded_checks=EXCLUDED, timeout=30)

    check()


def test_the_document_tells_of_every_route(told: dict[str, Any]) -> None:
    names = {name for name, _ in operations(told)}
    assert names == set(ANSWERS)
    assert names == {name.replace(":path", "") for name in scopes.ROUTES}


def test_the_document_knows_no_422_and_one_shape_of_error(told: dict[str, Any]) -> None:
    for name, operation in operations(told):
        assert "422" not in operation["responses"], name
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                reference = answer["content"]["application/json"]["schema"]["$ref"]
                assert reference.endswith(f"/{ErrorAnswer.__name__}")


def test_the_document_needs_the_key(small: str) -> None:
    assert httpx.get(f"{small}/openapi.json").status_code == 401


CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
MORE = {"stream_options": {"include_usage": True}, "return_progress": True, "session_id": "s"}


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 2, **MORE}, CompletionChunk),
        ("/v1/chat/completions", {**CHAT, **MORE}, ChatChunk),
        ("/v1/sessions/s/ingest", {"text": "hello the other day"}, IngestProgress | Ingested),
    ],
)
def test_every_event_of_a_stream_is_one_that_the_document_tells_of(
    small: str, path: str, body: dict[str, Any], kinds: Any
) -> None:
    httpx.post(f"{small}/v1/sessions", json={"id": "s"}, headers=KEY)
    answer = httpx.post(small + path, json={**body, "stream": True}, headers=KEY)
    *events, done = [part.strip() for part in answer.text.split("data: ")[1:]]
    assert done == "[DONE]"
    assert len([TypeAdapter(kinds).validate_json(event, strict=True) for event in events]) > 2
