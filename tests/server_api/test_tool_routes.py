"""Laws of llama.cpp's helper routes: tokens there and back, the template's text, the server's properties."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from engines import CONFIG, TOKENIZER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednl_runtime.server_api.answering.chat_template import PLAIN, PLAIN_NOTE
from fednl_runtime.state import state_bytes


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_comes_back_from_its_tokens(http: httpx.Client, text: str) -> None:
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == TOKENIZER.encode(text)
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}


def test_pieces_are_text_or_the_bytes_that_are_none(http: httpx.Client) -> None:
    pieces = http.post("/tokenize", json={"content": "the €", "with_pieces": True, "add_special": True}).json()
    assert [piece["piece"] for piece in pieces["tokens"]] == ["the", " ", [0xE2, 0x82], [0xAC]]


def test_a_rendered_chat_is_what_a_chat_reads(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt))


def test_the_properties_tell_the_template_the_slots_and_the_model(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert (props["chat_template"], props["chat_template_note"]) == (PLAIN, PLAIN_NOTE)
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 500
    assert props["model"] == http.get("/v1/models").json()["data"][0]


def test_a_model_tells_its_size_under_llama_cpps_names(http: httpx.Client) -> None:
    meta = http.get("/v1/models/tiny").json()["meta"]
    assert (meta["n_vocab"], meta["n_embd"]) == (CONFIG.vocab_size, CONFIG.d_model)
    assert meta["state_bytes"] == state_bytes(CONFIG)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "a", "pieces": True}, "pieces"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [CONFIG.vocab_size]}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "king", "content": "a"}]}, "messages"),
    ],
)
def test_a_wrong_field_is_400_and_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", b'{"content": "\\ud800"}', "content"),
        ("/apply-template", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    http: httpx.Client, path: str, body: bytes, param: str
) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
