"""Laws of requests that run: cancelled by their owner, kept or rolled back when their client leaves, sent again."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from engines import ENDLESS, committed, until

from fednl_runtime.engine import Engine
from fednl_runtime.errors import SessionNotFoundError
from fednl_runtime.server_api.entrance.security import ApiKey, KeyRing, digest_of

URL = "/v1/completions"
Serve = Callable[..., contextlib.AbstractContextManager[str]]


@contextlib.contextmanager
def slow(engine: Engine) -> Iterator[None]:
    """The engine takes its time for as long as the block runs."""
    engine.backend.delay_s = 0.01
    yield
    engine.backend.delay_s = 0.0


def running(engine: Engine, send: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread in which `send` runs once the model is at work on it, and the list that its result comes to."""
    results: list[Any] = []
    calls = len(engine.backend.calls)
    thread = threading.Thread(target=lambda: results.append(send()))
    thread.start()
    until(lambda: len(engine.backend.calls) > calls + 2)
    return thread, results


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_is_rolled_back_and_told_so(http: httpx.Client, engine: Engine, stream: bool) -> None:
    name, body = f"cancel-{stream}", {"prompt": "ab", "max_tokens": 1900, "stream": stream, **ENDLESS}
    headers = {"x-request-id": f"mine-{stream}", "x-session-id": name}
    with slow(engine):
        thread, results = running(engine, lambda: http.post(URL, json=body, headers=headers))
        answer = http.delete(f"/v1/requests/mine-{stream}")
        thread.join(60)
    assert answer.json() == {"id": f"mine-{stream}", "object": "request.cancelled", "cancelled": True}
    (response,) = results
    assert response.status_code == (200 if stream else 409)
    error = json.loads(response.text.split("data: ")[-1])["error"]
    assert error["code"] == "cancelled"
    assert "[DONE]" not in response.text
    with pytest.raises(SessionNotFoundError):
        committed(engine, name)


def test_a_request_that_does_not_run_cannot_be_cancelled(http: httpx.Client) -> None:
    done = http.post(URL, json={"prompt": "a"}).headers["x-request-id"]
    for name in (done, "never"):
        response = http.delete(f"/v1/requests/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


def test_a_request_is_cancelled_with_its_own_key_only(engine: Engine, serve: Serve, http: httpx.Client) -> None:
    keys = [ApiKey(name, frozenset({"infer"}), digest_of(name.encode())) for name in ("one", "two")]
    body = {"prompt": "ab", "max_tokens": 1900, **ENDLESS}
    with serve(engine, keys=KeyRing(keys)) as address, slow(engine):
        one, two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
        ours = {**one, "x-request-id": "ours"}
        thread, results = running(engine, lambda: httpx.post(address + URL, json=body, headers=ours, timeout=60))
        assert httpx.delete(f"{address}/v1/requests/ours", headers=two).status_code == 404
        assert httpx.delete(f"{address}/v1/requests/ours", headers=one).status_code == 200
        thread.join(60)
    assert results[0].status_code == 409


def leave(url: str, body: dict[str, Any]) -> None:
    """Ask for an answer and go away: from a stream after some of it, from a whole answer after 0.3 s."""
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.3) as response:
        lines = response.iter_lines()
        for _ in range(9):
            next(lines)


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("on_disconnect", ["rollback", "commit"])
def test_a_client_that_leaves_finds_its_turn_as_it_wished(
    address: str, http: httpx.Client, engine: Engine, path: str, stream: bool, on_disconnect: str
) -> None:
    name = f"leave-{stream}-{on_disconnect}-{path.count('/')}"
    said = {"prompt": "ab"} if path == URL else {"messages": [{"role": "user", "content": "ab"}]}
    body = {**said, "session_id": name, "max_tokens": 1900, "stream": stream, **ENDLESS}
    calls = len(engine.backend.calls)
    with slow(engine):
        leave(address + path, {**body, "on_disconnect": on_disconnect})
    until(lambda: not engine.scheduler._active and not engine.scheduler._keys)
    assert len(engine.backend.calls) < calls + 1000
    if on_disconnect == "rollback":
        with pytest.raises(SessionNotFoundError):
            committed(engine, name)
    else:
        assert committed(engine, name).version == 1
        assert 2 < committed(engine, name).tokens_seen < 1000


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_under_a_key_used_before_is_answered_again_and_learnt_once(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "ab", "session_id": f"again-{stream}", "stream": stream, "max_tokens": 6, **ENDLESS}
    headers = {"Idempotency-Key": "one"}
    first, second = (http.post(URL, json=body, headers=headers).text for _ in range(2))
    last, again = (json.loads([x for x in t.split("data: ") if "session" in x][-1]) for t in (first, second))
    assert (last["session"]["version"], again["session"]["version"]) == (1, 1)
    assert (last["session"]["replayed"], again["session"]["replayed"]) == (False, True)
    assert texts(first) == texts(second)
    assert http.get(f"/v1/sessions/again-{stream}").json()["version"] == 1


def texts(answer: str) -> str:
    """The text of an answer, whole or streamed."""
    parts = [json.loads(part) for part in answer.split("data: ") if part.strip() and "[DONE]" not in part]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def test_a_replay_says_so_in_a_header(http: httpx.Client) -> None:
    body, headers = {"prompt": "ab", "session_id": "replay"}, {"Idempotency-Key": "k"}
    assert "idempotent-replay" not in http.post(URL, json=body, headers=headers).headers
    assert http.post(URL, json=body, headers=headers).headers["idempotent-replay"] == "true"


def test_a_key_used_before_with_another_body_is_400(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "k"}
    http.post(URL, json={"prompt": "ab", "session_id": "other"}, headers=headers)
    response = http.post(URL, json={"prompt": "abc", "session_id": "other"}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "idempotency_mismatch")


def test_a_client_that_says_it_sent_the_same_before_is_answered_again(http: httpx.Client) -> None:
    body = {"prompt": "ab", "session_id": "retried"}
    http.post(URL, json=body)
    response = http.post(URL, json=body, headers={"x-stainless-retry-count": "1"})
    assert response.json()["session"]["replayed"] is True
    assert http.post(URL, json=body).json()["session"]["version"] == 2


@pytest.mark.parametrize("key", ["", "a" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(http: httpx.Client, key: str) -> None:
    response = http.post(URL, json={"prompt": "a"}, headers={"Idempotency-Key": key})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "idempotency-key")


def test_progress_is_told_while_a_long_prompt_is_read(http: httpx.Client) -> None:
    body = {"prompt": [1] * 40, "max_tokens": 1, "stream": True, "return_progress": True}
    events = [json.loads(part) for part in http.post(URL, json=body).text.split("data: ")[1:-1]]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [p["processed"] for p in told] == sorted(p["processed"] for p in told)
    assert (told[-1]["processed"], told[-1]["total"]) == (40, 40)
    assert len(told) > 3


def test_timings_have_llama_cpps_names_and_count_what_was_done(http: httpx.Client) -> None:
    timings = http.post(URL, json={"prompt": "abcd", "max_tokens": 5, **ENDLESS}).json()["timings"]
    names = [f"{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")]
    assert list(timings) == ["cache_n", *names]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 4, 5)
    assert timings["predicted_ms"] == pytest.approx(5 * timings["predicted_per_token_ms"])
