"""Laws of /v1/chat/completions: OpenAI's shapes, the template's text, histories, chores that teach nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from engines import ENDLESS, TOKENIZER, committed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.answering.chat_template import PLAIN_STOP, ChatTemplate
from fednl_runtime.server_api.schemas.chat import DEFAULT_MAX_TOKENS, ROLES

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello the other day"}]
RENDERED = "USER.\nhello the other day\n\nASSISTANT.\n"
QUIET = {"max_tokens": 4, "temperature": 0, **ENDLESS}
NUMBER = itertools.count()


def fresh() -> str:
    """A session id no other test uses."""
    return f"c{next(NUMBER)}"


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    """A greedy answer, with our extras among the fields."""
    extras = {name: fields.pop(name) for name in ("session_id", "learn", "session_mode") if name in fields}
    options = {"model": "tiny", "max_tokens": 5, "temperature": 0, **fields}
    return client.chat.completions.create(messages=messages, extra_body=extras, **options)


def chunks(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream before its [DONE]."""
    with http.stream("POST", URL, json={"messages": HELLO, "stream": True, **QUIET, **body}) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def test_a_chat_has_openais_shape(http: httpx.Client) -> None:
    response = http.post(URL, json={"messages": HELLO, "max_tokens": 3})
    body = response.json()
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "session", "timings"]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode(RENDERED))


def test_a_chat_answers_as_the_completion_of_its_rendered_text_does(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="tiny", prompt=RENDERED, max_tokens=30, temperature=0, stop=list(PLAIN_STOP)
    )
    assert chat(client, max_tokens=30).choices[0].message.content == completion.choices[0].text


def test_a_stream_names_the_speaker_first_and_the_reason_last(http: httpx.Client) -> None:
    first, *middle, last = chunks(http)
    assert {c["object"] for c in (first, *middle, last)} == {"chat.completion.chunk"}
    assert len({c["id"] for c in (first, *middle, last)}) == 1
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(list(c["choices"][0]["delta"]) == ["content"] for c in middle)
    assert [c["choices"][0]["finish_reason"] for c in (first, *middle)] == [None] * (1 + len(middle))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert "session" in last


def test_a_streams_pieces_join_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=40).choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chat(client, max_tokens=40, stream=True)) == whole


def test_usage_comes_alone_and_only_when_it_is_asked_for(http: httpx.Client) -> None:
    assert not any("usage" in c for c in chunks(http))
    *parts, last = chunks(http, stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in parts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


def test_several_answers_are_numbered_and_each_begins_with_its_speaker(http: httpx.Client) -> None:
    parts = [c["choices"][0] for c in chunks(http, n=2, seed=3, temperature=1)]
    assert [p["index"] for p in parts if "role" in p["delta"]] == [0, 1]
    assert [p["index"] for p in parts if p["finish_reason"]] == [0, 1]


def test_logprobs_tell_each_token_with_its_bytes_and_rivals(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=20, logit_bias=ENDLESS["logit_bias"]).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == choice.message.content
    assert all(len(token.top_logprobs) == 20 for token in content)
    assert all(token.logprob == pytest.approx(token.top_logprobs[0].logprob) for token in content)
    streamed = chat(client, logprobs=True, stream=True, logit_bias=ENDLESS["logit_bias"])
    parts = [c.choices[0].logprobs for c in streamed]
    assert [t.token for part in parts if part for t in part.content] == [token.token for token in content]


def test_a_stop_string_and_the_templates_own_both_end_an_answer(http: httpx.Client) -> None:
    newline = {str(t): 100 for t in TOKENIZER.encode("\n")}
    body = {"messages": HELLO, "max_tokens": 9, "logit_bias": newline}
    choice = http.post(URL, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    choice = http.post(URL, json={**body, "stop": ["\n", "a", "b", "c"]}).json()
    assert choice["usage"]["completion_tokens"] == 1


def test_the_newer_name_of_max_tokens_does_the_same(http: httpx.Client) -> None:
    for fields, expected in (({"max_completion_tokens": 3}, 3), ({"max_tokens": 2, "max_completion_tokens": 2}, 2)):
        body = http.post(URL, json={"messages": HELLO, **ENDLESS, **fields}).json()
        assert body["usage"]["completion_tokens"] == expected


def test_an_answer_without_a_number_of_tokens_ends_at_the_default(http: httpx.Client) -> None:
    body = http.post(URL, json={"messages": HELLO, "logit_bias": {str(TOKENIZER.encode("x")[0]): 100}}).json()
    assert body["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS


def test_content_may_be_text_parts_and_fields_of_openais_answers_may_be_empty(client: openai.OpenAI) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "hello the "}, {"type": "text", "text": "other day"}]}
    ]
    whole = chat(client).choices[0].message
    assert chat(client, parts).choices[0].message.content == whole.content
    again = [*HELLO, whole.model_dump(), {"role": "user", "name": "me", "content": "and?"}]
    assert chat(client, again).usage.prompt_tokens > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "reasoning_effort": "low", "verbosity": "low"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"safety_identifier": "x", "prompt_cache_key": "y", "functions": None, "top_logprobs": None, "seed": None},
    ],
)
def test_what_clients_send_unasked_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(URL, json={"messages": HELLO, "max_tokens": 1, **fields}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "the" * 600}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 2, "session_id": "a"}, "n"),
        ({"echo": True}, "echo"),
        ({"best_of": 1}, "best_of"),
        ({"leran": False}, "leran"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_400_and_named(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = http.post(URL, json={"messages": HELLO, "stream": stream, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"]


def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(http: httpx.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    response = http.post(URL, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_history_sent_again_is_read_once(http: httpx.Client, engine: Engine) -> None:
    name, messages, seen = fresh(), list(HELLO), 0
    for turn in range(1, 4):
        body = {"messages": messages, "max_tokens": 4, "session_id": name, "seed": turn}
        answer = http.post(URL, json=body).json()
        usage, cached = answer["usage"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == seen
        assert answer["timings"]["prompt_n"] == usage["prompt_tokens"] - cached
        assert answer["session"]["version"] == turn
        seen = usage["total_tokens"]
        assert committed(engine, name).tokens_seen == seen
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "the other day"}]


def test_an_edited_history_goes_on_from_where_it_still_agrees(http: httpx.Client) -> None:
    name = fresh()
    first = http.post(URL, json={"messages": HELLO, "max_tokens": 4, "session_id": name, "temperature": 0}).json()
    said = [*HELLO, first["choices"][0]["message"]]
    one = [*said, {"role": "user", "content": "one"}]
    other = [*said, {"role": "user", "content": "the other"}]
    for messages in (one, other):
        answer = http.post(URL, json={"messages": messages, "max_tokens": 4, "session_id": name}).json()
        assert answer["session"]["parent_version"] == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]


def test_an_answer_that_is_no_text_is_known_again_as_it_was_sent(http: httpx.Client) -> None:
    name, broken = fresh(), {str(TOKENIZER.encode("€")[0]): 100}
    body = {"messages": HELLO, "max_tokens": 1, "session_id": name, "logit_bias": broken}
    first = http.post(URL, json=body).json()
    assert first["choices"][0]["message"]["content"] == "\ufffd"
    messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "€"}]
    again = http.post(URL, json={**body, "messages": messages}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]


def test_mode_append_reads_the_messages_after_what_was_read(http: httpx.Client) -> None:
    name = fresh()
    body = {"messages": HELLO, "max_tokens": 4, "session_id": name, "session_mode": "append"}
    seen = [http.post(URL, json=body).json()["session"]["tokens_seen"] for _ in range(2)]
    assert seen[1] == 2 * seen[0]


@pytest.mark.parametrize(
    "task",
    [
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
        "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history",
        "### Task:\nSuggest 3-5 relevant follow-up questions or prompts",
        "### Task:\nAnalyze the chat history to determine the necessity of generating search queries",
        "Provide a concise, 5-word-or-less title for the conversation, using title case conventions.",
    ],
)
def test_a_chore_of_a_front_end_teaches_nothing_unless_it_says_so(http: httpx.Client, task: str) -> None:
    name = fresh()
    body = {"messages": [{"role": "user", "content": task}], "max_tokens": 2, "session_id": name}
    assert http.post(URL, json=body).json()["session"]["learned"] is False
    assert http.get(f"/v1/sessions/{name}").status_code == 404
    assert http.post(URL, json={**body, "learn": True}).json()["session"]["learned"] is True


def test_what_a_user_asks_about_documents_is_no_chore(http: httpx.Client) -> None:
    text = "### Task:\nRespond to the user query using the provided context"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "session_id": fresh()}
    assert http.post(URL, json=body).json()["session"]["learned"] is True


def test_a_dry_run_tells_what_would_be_learnt_and_keeps_nothing(http: httpx.Client) -> None:
    name = fresh()
    body = {"messages": HELLO, "max_tokens": 4, "session_id": name, "learn": "dry_run"}
    session = http.post(URL, json=body).json()["session"]
    assert session["update_norm"] > 0
    assert session["learned"] is False
    assert http.get(f"/v1/sessions/{name}").status_code == 404


def test_a_version_that_is_not_the_sessions_is_409(client: openai.OpenAI, http: httpx.Client) -> None:
    name = fresh()
    body = {"messages": HELLO, "max_tokens": 2, "session_id": name}
    assert http.post(URL, json={**body, "session_version": 0}).json()["session"]["version"] == 1
    response = http.post(URL, json={**body, "session_version": 0})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_version_conflict")
    assert response.headers["x-should-retry"] == "false"


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=9)}
    ),
    min_size=1,
    max_size=5,
)


@given(MESSAGES, MESSAGES)
def test_the_plain_template_only_adds_text_for_further_messages(
    before: list[dict[str, str]], after: list[dict[str, str]]
) -> None:
    template, reply = ChatTemplate(), {"role": "assistant", "content": "yes"}
    assert template.render([*before, reply, *after]).startswith(template.render(before) + "yes" + PLAIN_STOP[0])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(0, 2**32))
def test_characters_of_an_answer_stream_whole(http: httpx.Client, content: str, seed: int) -> None:
    euro = {str(t): 100 for t in TOKENIZER.encode("€")}
    body = {"messages": [{"role": "user", "content": content}], **QUIET, "temperature": 1, "seed": seed}
    body |= {"logit_bias": euro, "max_tokens": 7}
    whole = http.post(URL, json=body).json()["choices"][0]["message"]["content"]
    pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks(http, **body)]
    assert "".join(pieces) == whole
