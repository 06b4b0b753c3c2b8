"""Laws of failure over HTTP: one shape for every status, and nothing learnt."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from engines import CONFIG, ENDLESS, TOKENIZER, committed, running_engine, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednl_runtime import errors
from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.errors import SessionNotFoundError
from fednl_runtime.guard import NormCaps
from fednl_runtime.server_api.answering.streaming import sse
from fednl_runtime.server_api.errors import STATUSES, GenerationError, ModelNotFoundError, describe
from fednl_runtime.server_api.schemas.chat import ROLES, ChatRequest
from fednl_runtime.server_api.schemas.completions import KINDS, CompletionRequest
from fednl_runtime.state_file import StateFormat
from fednl_runtime.vault import StoreLimits

URL = "/v1/completions"
Serve = Callable[..., contextlib.AbstractContextManager[str]]


def check_shape(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> None:
    """Assert OpenAI's error object, complete."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 999999}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2001}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        *(({name: 10**400}, name) for name in ("max_tokens", "temperature", "top_k", "n", "logprobs")),
        ({"prompt": [10**400]}, "prompt"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 33}, "n"),
        ({"n": 2, "session_id": "a"}, "n"),
        ({"prompt": ["a", "b"], "session_id": "a"}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": -1}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [9999]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "the" * 600}, "prompt"),
        ({"session_id": "../a"}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a" * 129}, "session_id"),
        ({"session_id": "a\n"}, "session_id"),
        ({"learn": "yes"}, "learn"),
        ({"session_mode": "both"}, "session_mode"),
        ({"session_version": 1.5}, "session_version"),
        ({"session_version": 1}, "session_version"),
        ({"on_disconnect": "keep"}, "on_disconnect"),
        ({"leran": False}, "leran"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_400_and_named(http: httpx.Client, body: dict[str, Any], param: str, stream: bool) -> None:
    options = {} if "stream_options" in body else {"stream": stream}
    check_shape(http.post(URL, json={"prompt": "a", **options, **body}), 400, param=param)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", 5), ("prompt", [1, "a"]), ("prompt", [["a"]]), ("prompt", [[1], "a"]), ("stop", {}), ("stop", [1])],
)
def test_a_field_of_several_kinds_is_refused_with_all_of_them(http: httpx.Client, field: str, value: Any) -> None:
    response = http.post(URL, json={field: value})
    check_shape(response, 400, param=field)
    assert response.json()["error"]["message"] == f"{field} must be {KINDS[field]}."


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_json_that_is_not_said_to_be_json_is_refused_with_the_header_it_needs(http: httpx.Client, kind: str) -> None:
    response = http.post(URL, content=b'{"prompt": "a"}', headers={"content-type": kind})
    check_shape(response, 415, "unsupported_media_type")
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'"a"',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
    ],
)
def test_a_body_that_cannot_be_read_is_400(http: httpx.Client, content: bytes) -> None:
    response = http.post(URL, content=content, headers={"content-type": "application/json"})
    check_shape(response, 400, param=response.json()["error"]["param"])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("ab"), x, max_size=2),
    max_leaves=4,
)
HELD = ("stream", "session_id")
BODIES = st.dictionaries(
    st.sampled_from([f for f in CompletionRequest.model_fields if f not in HELD]), JSON, max_size=4
)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), st.sampled_from(ROLES) | JSON)
CHATS = st.dictionaries(
    st.sampled_from([f for f in ChatRequest.model_fields if f not in HELD]),
    st.lists(MESSAGE, max_size=2) | JSON,
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES | CHATS)
def test_any_body_is_answered_or_refused_in_the_one_shape(http: httpx.Client, body: dict[str, Any]) -> None:
    hello = {"messages": [{"role": "user", "content": "a"}]}
    for url, needed in ((URL, {}), ("/v1/chat/completions", hello)):
        check_any(http, url, {"max_tokens": 1, **needed, **body})


def check_any(http: httpx.Client, url: str, body: dict[str, Any]) -> None:
    """Assert that a body is answered, or refused in the one shape."""
    response = http.post(url, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert list(response.json()["error"]) == ["message", "type", "param", "code"]


def test_unknown_routes_methods_and_models_are_404_405_404(http: httpx.Client) -> None:
    check_shape(http.get("/v2/nothing"), 404, "not_found")
    check_shape(http.get("/docs"), 404, "not_found")
    check_shape(http.get(URL), 405, "method_not_allowed")
    check_shape(http.post(URL, json={"model": "gpt-4", "prompt": "a"}), 404, "model_not_found")


def test_a_large_body_is_413_whether_or_not_it_says_its_length(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    check_shape(http.post(URL, json={"prompt": "a" * 20_000}), 413, "request_too_large")
    check_shape(
        http.post(URL, content=chunks(), headers={"content-type": "application/json"}), 413, "request_too_large"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_model_is_500_and_leaves_no_session(http: httpx.Client, engine: Engine, stream: bool) -> None:
    engine.backend.fail_at = 1
    response = http.post(URL, json={"prompt": "abcd", "session_id": "broken", "stream": stream})
    check_shape(response, 500, "generation_failed")
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(SessionNotFoundError):
        committed(engine, "broken")


def test_a_failure_after_the_stream_began_is_an_event_without_done(client: openai.OpenAI, engine: Engine) -> None:
    engine.backend.fail_at = 4
    bias = {str(TOKENIZER.encode("x")[0]): 100}
    stream = client.completions.create(
        model="tiny", prompt="ab", logit_bias=bias, stream=True, extra_body={"session_id": "b"}
    )
    with pytest.raises(openai.APIError, match="as it was before"):
        list(stream)
    with pytest.raises(SessionNotFoundError):
        committed(engine, "b")


def test_a_breach_is_500_and_says_so(serve: Serve) -> None:
    with running_engine() as engine, serve(engine) as address:
        engine.caps = NormCaps(token=1e-9)
        response = httpx.post(address + URL, json={"prompt": "a", "session_id": "a"})
        check_shape(response, 500, "memory_breach")


@contextlib.contextmanager
def long_request(engine: Engine, address: str, **fields: Any) -> Iterator[None]:
    """A request that runs, slowly, until the block ends."""
    engine.backend.delay_s = 0.01
    body = {"prompt": "a", "max_tokens": 1500, **ENDLESS, **fields}
    thread = threading.Thread(target=httpx.post, args=(address + URL,), kwargs={"json": body, "timeout": 120})
    thread.start()
    yield
    engine.backend.delay_s = 0.0
    thread.join(60)


def test_a_session_that_stays_busy_is_409(http: httpx.Client, address: str, engine: Engine) -> None:
    with long_request(engine, address, session_id="busy"):
        until(lambda: engine.scheduler._keys)
        response = http.post(URL, json={"prompt": "a", "session_id": "busy"})
        check_shape(response, 409, "session_busy")
        assert response.headers["retry-after"]


def test_a_full_queue_is_429(http: httpx.Client, address: str, engine: Engine) -> None:
    with contextlib.ExitStack() as running:
        for _ in range(4):
            running.enter_context(long_request(engine, address))
        until(lambda: (len(engine.scheduler._active), len(engine.scheduler._waiting)) == (2, 2))
        response = http.post(URL, json={"prompt": "a"})
        check_shape(response, 429, "queue_full")
        assert response.headers["retry-after"]


def test_too_many_sessions_are_429_and_not_retried(serve: Serve) -> None:
    room = StoreLimits(resident_bytes=3 * StateFormat(CONFIG, "", "").max_bytes // 2)
    with running_engine(EngineLimits(store=room)) as engine, serve(engine) as address:
        assert httpx.post(address + URL, json={"prompt": "a", "session_id": "a"}).status_code == 200
        response = httpx.post(address + URL, json={"prompt": "a", "session_id": "b"})
        check_shape(response, 429, "session_limit")
        assert response.headers["x-should-retry"] == "false"


def test_a_bug_of_ours_is_500_in_the_one_shape(
    http: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", None)
    check_shape(http.post(URL, json={"prompt": "a"}), 500, "internal_error")


def test_events_are_one_line_for_clients_that_split_at_any_line_end() -> None:
    text = "a\u0085b\u2028c\r\nd"
    event = sse({"text": text}).decode()
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("error", [errors.RequestError, errors.SessionBusyError, ModelNotFoundError, GenerationError])
def test_our_errors_show_their_sentence(error: type[Exception]) -> None:
    status, body = describe(error("Do this."))
    assert status is STATUSES[error]
    assert body["error"]["message"] == "Do this."


def test_an_unexpected_error_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    status, body = describe(KeyError("secret"))
    assert status.status == 500
    assert "secret" not in json.dumps(body)
    assert "KeyError" in caplog.text
