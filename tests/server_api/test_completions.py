"""Laws of /v1/completions, through the openai client: exact shapes, and turns that learn or do not."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import httpx
import openai
import pytest
from engines import CONFIG, TOKENIZER, committed

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.answering.turn_of import SESSION_HEADERS
from fednl_runtime.server_api.schemas.completions import CompletionRequest
from fednl_runtime.state import state_bytes
from fednl_runtime.tokenizer import END_OF_TEXT

PROMPT = "hello the other day"
TOKENS = TOKENIZER.encode(PROMPT)
NUMBER = itertools.count()


def fresh() -> str:
    """A session id no other test uses."""
    return f"s{next(NUMBER)}"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """A greedy completion, with our extras among the fields."""
    extras = {name: fields.pop(name) for name in ("session_id", "learn", "top_k", "min_p") if name in fields}
    options = {"model": "tiny", "max_tokens": 5, "temperature": 0, **fields}
    return client.completions.create(prompt=prompt, extra_body=extras, **options)


def events(http: httpx.Client, **body: Any) -> list[str]:
    """The data of a stream's events."""
    with http.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_a_completion_has_openais_shape(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
    body = response.json()
    session = body.pop("session")
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "timings"]
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert abs(body["created"] - time.time()) < 60
    assert list(body["choices"][0]) == ["text", "index", "logprobs", "finish_reason"]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": len(TOKENS),
        "completion_tokens": 3,
        "total_tokens": len(TOKENS) + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert session["id"] is None
    assert response.headers["x-request-id"].startswith("req_")


def test_the_four_kinds_of_prompt_say_the_same(client: openai.OpenAI) -> None:
    one = complete(client).choices[0].text
    assert complete(client, TOKENS).choices[0].text == one
    assert [c.text for c in complete(client, [PROMPT, PROMPT]).choices] == [one, one]
    assert [c.text for c in complete(client, [TOKENS, TOKENS]).choices] == [one, one]


def test_a_streams_pieces_join_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=40)
    chunks = list(complete(client, max_tokens=40, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1


def test_a_stream_ends_with_done_and_tells_no_usage_unasked(http: httpx.Client) -> None:
    *chunks, done = events(http, prompt=PROMPT)
    assert done == "[DONE]"
    assert not any("usage" in json.loads(c) for c in chunks)
    assert ["session" in json.loads(c) for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_usage_asked_for_is_null_on_chunks_and_alone_on_the_last(http: httpx.Client) -> None:
    *data, done = events(http, prompt=PROMPT, max_tokens=4, stream_options={"include_usage": True})
    *chunks, last = map(json.loads, data)
    assert done == "[DONE]"
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_several_answers_to_several_prompts_are_numbered_in_order(client: openai.OpenAI) -> None:
    body = complete(client, [PROMPT, "the"], n=2, temperature=1, seed=7)
    assert [c.index for c in body.choices] == [0, 1, 2, 3]
    assert body.choices[0].text != body.choices[1].text
    assert body.usage.prompt_tokens == len(TOKENS) + 1
    assert body.usage.completion_tokens == 20


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    first, again, other = (complete(client, temperature=1, max_tokens=20, seed=s).choices[0].text for s in (1, 1, 2))
    assert first == again != other


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + plain
    assert complete(client, echo=True, max_tokens=0).choices[0].text == PROMPT
    assert "".join(c.choices[0].text for c in complete(client, echo=True, stream=True)) == PROMPT + plain


def test_echoed_logprobs_score_the_prompt_and_place_each_token(client: openai.OpenAI, engine: Engine) -> None:
    choice = complete(client, echo=True, max_tokens=0, logprobs=2, learn=False).choices[0]
    scores = [-s for s in engine.score(tuple(TOKENS))]
    assert choice.logprobs.tokens == [TOKENIZER.decode([t]) for t in TOKENS]
    assert choice.logprobs.token_logprobs == [None, *map(pytest.approx, scores[1:])]
    assert choice.logprobs.top_logprobs[0] is None
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs[1:])
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_a_token_named_twice_by_logit_bias_has_its_last_bias() -> None:
    body = CompletionRequest(logit_bias={"1": 100, "01": 90, "2": 3})
    assert body.sampling(most=9).logit_bias == ((1, 90), (2, 3))


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_end_of_text_that_ends_the_prompt_has_its_logprob(client: openai.OpenAI, max_tokens: int) -> None:
    fields = {"prompt": [*TOKENS, TOKENIZER.end_of_text], "max_tokens": max_tokens, "echo": True, "logprobs": 0}
    choice = complete(client, logit_bias={str(TOKENIZER.end_of_text): 100}, learn=False, **fields).choices[0]
    assert choice.logprobs.tokens == [*(TOKENIZER.decode([t]) for t in TOKENS), END_OF_TEXT]
    assert choice.logprobs.text_offset[-1] == len(choice.text)


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields = {"max_tokens": 30, "logprobs": 1, "echo": True, "prompt": "€ the €"}
    whole = complete(client, **fields).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in complete(client, stream=True, **fields)]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)


def test_a_stop_string_is_cut_off_with_its_logprobs(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=20).choices[0].text
    stop = text[4:6]
    choice = complete(client, max_tokens=20, stop=[stop], logprobs=0).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert all(offset < len(choice.text) for offset in choice.logprobs.text_offset)


def test_characters_split_over_tokens_stream_whole(client: openai.OpenAI) -> None:
    bias = {str(t): 100 for t in TOKENIZER.encode("€")}
    chunks = list(complete(client, max_tokens=12, temperature=1, seed=0, logit_bias=bias, stream=True))
    text = complete(client, max_tokens=12, temperature=1, seed=0, logit_bias=bias).choices[0].text
    assert "".join(c.choices[0].text for c in chunks) == text


def test_a_session_goes_on_where_it_was(client: openai.OpenAI) -> None:
    split, whole = fresh(), fresh()
    first = complete(client, session_id=split, max_tokens=2)
    second = complete(client, "", session_id=split, max_tokens=3)
    assert first.choices[0].text + second.choices[0].text == complete(client, session_id=whole).choices[0].text
    assert second.session == {
        "id": split,
        "version": 2,
        "parent_version": 1,
        "tokens_seen": len(TOKENS) + 5,
        "learned": True,
        "update_norm": second.session["update_norm"],
        "surprise": None,
        "state_bytes": state_bytes(CONFIG),
        "persisted": False,
        "replayed": False,
    }
    assert first.session["surprise"] > 0


def test_a_stream_reports_what_was_committed(client: openai.OpenAI, engine: Engine) -> None:
    name = fresh()
    last = list(complete(client, session_id=name, stream=True))[-1]
    assert last.session["version"] == 1 == committed(engine, name).version


def test_learn_false_leaves_the_session_alone(client: openai.OpenAI, engine: Engine) -> None:
    name = fresh()
    complete(client, session_id=name)
    before = committed(engine, name)
    body = complete(client, session_id=name, learn=False, n=2)
    assert (body.session["version"], body.session["learned"]) == (1, False)
    assert committed(engine, name).state is before.state


def test_the_session_header_serves_clients_without_extra_fields(http: httpx.Client) -> None:
    name = fresh()
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Session-Id": name})
    assert response.headers["x-session-id"] == name
    assert response.headers["x-session-version"] == "1"


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_session_is_named_by_any_header_that_clients_send(http: httpx.Client, header: str) -> None:
    name = fresh()
    response = http.post("/v1/completions", json={"prompt": "a", "session_id": name}, headers={header: name})
    assert response.json()["session"]["id"] == name
    assert http.post("/v1/completions", json={"prompt": "a"}, headers={header: ""}).json()["session"]["id"] is None


def test_two_places_that_name_different_sessions_are_refused(http: httpx.Client) -> None:
    headers = {"X-Session-Id": "one", "X-OpenWebUI-Chat-Id": "two"}
    for body, sent in (({}, headers), ({"session_id": "three"}, {"X-Session-Id": "one"})):
        response = http.post("/v1/completions", json={"prompt": "a", **body}, headers=sent)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")


def test_a_session_can_be_looked_at_and_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    name = fresh()
    complete(client, session_id=name)
    seen = http.get(f"/v1/sessions/{name}").json()
    assert (seen["object"], seen["version"], seen["tokens_seen"]) == ("session", 1, len(TOKENS) + 5)
    assert http.delete(f"/v1/sessions/{name}").json() == {"id": name, "object": "session.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        response = http.request(method, f"/v1/sessions/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
    assert complete(client, session_id=name).session["version"] == 1


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert (model.id, model.object, model.owned_by, model.created) == ("tiny", "model", "fednl-runtime", 1_700_000_000)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_needs_nothing(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
