"""LangChain's ChatOpenAI against a running server: sessions by extra_body and by header, streams, what it drops."""

from __future__ import annotations

from typing import Any

import httpx
from engines import committed
from langchain_openai import ChatOpenAI

from fednl_runtime.engine import Engine


def model(address: str, **fields: Any) -> ChatOpenAI:
    """A chat model of the server."""
    return ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="tiny", max_tokens=5, temperature=0, **fields)


def test_a_session_is_named_by_extra_body(address: str, http: httpx.Client, engine: Engine) -> None:
    chat = model(address, extra_body={"session_id": "chain"})
    first = chat.invoke([("system", "A street."), ("human", "hello")])
    assert first.type == "ai"
    assert committed(engine, "chain").version == 1
    again = chat.invoke([("system", "A street."), ("human", "hello"), first, ("human", "the other day")])
    assert again.usage_metadata
    assert again.usage_metadata["input_token_details"]["cache_read"] == first.usage_metadata["total_tokens"]


def test_a_session_is_named_by_a_header(address: str, http: httpx.Client, engine: Engine) -> None:
    chat = model(address, default_headers={"X-Session-Id": "headed"}, include_response_headers=True)
    answer = chat.invoke("hello")
    assert answer.response_metadata["headers"]["x-session-version"] == "1"
    assert committed(engine, "headed").version == 1


def test_a_stream_adds_up_to_the_answer_and_its_outcome_can_be_asked_for(address: str, http: httpx.Client) -> None:
    whole = model(address).invoke("hello").content
    streamed = model(address, extra_body={"session_id": "streamed"}, stream_usage=True)
    chunks = list(streamed.stream("hello"))
    assert "".join(str(chunk.content) for chunk in chunks) == whole
    assert any(chunk.usage_metadata for chunk in chunks)
    assert http.get("/v1/sessions/streamed").json()["version"] == 1


def test_logprobs_and_stop_reach_the_server(address: str, http: httpx.Client) -> None:
    answer = model(address, logprobs=True, top_logprobs=2).invoke("hello", stop=["zz"])
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])
