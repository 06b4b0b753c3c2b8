"""Laws of ingest and score: learn a text and say nothing, or score it and keep nothing."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from engines import TOKENIZER, committed, until

TEXT = "the hello of the hello, " * 3


@pytest.fixture(autouse=True)
def fresh(engine, http):
    """A new session a for each test."""
    for record in engine.sessions.page("", limit=1000):
        engine.sessions.delete(record.key)
    http.post("/v1/sessions", json={"id": "a"}).raise_for_status()


def ingest(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return dict(http.post("/v1/sessions/a/ingest", json=body).raise_for_status().json())


def events(http: httpx.Client, **body: Any) -> list[Any]:
    """What a streamed answer says, event by event."""
    with http.stream("POST", "/v1/sessions/a/ingest", json={"stream": True, **body}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_ingest_leaves_the_memory_that_a_completion_of_no_tokens_leaves(http, engine):
    told = ingest(http, text=TEXT)
    body = {"prompt": TEXT, "max_tokens": 0, "session_id": "b"}
    same = http.post("/v1/completions", json=body).json()["session"]
    assert told["session"] == {**same, "id": "a"}
    assert told["tokens"] == len(TOKENIZER.encode(TEXT))
    a, b = (committed(engine, name).state.tensors for name in "ab")
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_ingest_tells_the_version_in_its_headers(http):
    response = http.post("/v1/sessions/a/ingest", json={"tokens": [1, 2, 3]})
    assert (response.headers["x-session-id"], response.headers["x-session-version"]) == ("a", "1")


def test_a_streamed_ingest_tells_every_piece_and_at_last_what_was_learnt(http):
    *progress, last, done = events(http, text=TEXT)
    total = len(TOKENIZER.encode(TEXT))
    processed = [event["processed"] for event in progress]
    assert processed == sorted(set(processed))
    assert (processed[-1], {event["total"] for event in progress}) == (total, {total})
    assert (last["object"], last["session"]["version"], done) == ("session.ingest", 1, "[DONE]")
    sizes = np.diff([0, *processed])
    weights = sizes - (np.arange(len(sizes)) == 0)  # nothing came before the first token
    mean = sum(w * event["surprise"] for w, event in zip(weights, progress, strict=True)) / weights.sum()
    assert last["session"]["surprise"] == pytest.approx(mean)


def test_an_ingest_that_fails_on_its_way_says_so_last_and_leaves_no_trace(http, engine):
    engine.backend.fail_at = 20
    *_, last = events(http, text=TEXT)
    assert last["error"]["code"] == "generation_failed"
    assert http.get("/v1/sessions/a").json()["version"] == 0


def test_a_client_that_leaves_an_ingest_rolls_it_back_or_keeps_what_was_read(http, engine):
    engine.backend.delay_s = 0.02
    for keep, version in (("rollback", 0), ("commit", 1)):
        body = {"text": TEXT * 5, "stream": True, "on_disconnect": keep}
        with http.stream("POST", "/v1/sessions/a/ingest", json=body) as response:
            next(response.iter_lines())
        until(lambda: engine.scheduler.load() == (0, 0))
        until(lambda version=version: http.get("/v1/sessions/a").json()["version"] == version)
    assert 0 < http.get("/v1/sessions/a").json()["tokens_seen"] < len(TOKENIZER.encode(TEXT * 5))


def test_an_ingest_that_counts_on_another_version_is_refused(http):
    ingest(http, text="hello")
    response = http.post("/v1/sessions/a/ingest", json={"text": "hello", "session_version": 0})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_version_conflict")
    assert response.headers["x-should-retry"] == "false"
    assert ingest(http, text="hello", session_version=1)["session"]["version"] == 2


def test_an_ingest_under_the_same_key_is_learnt_once(http):
    headers = {"idempotency-key": "k"}
    first, again = (
        http.post("/v1/sessions/a/ingest", json={"text": TEXT}, headers=headers).json()["session"] for _ in range(2)
    )
    assert (again["version"], again["replayed"], first["replayed"]) == (1, True, False)
    other = http.post("/v1/sessions/a/ingest", json={"text": "other"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_mismatch")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"tokens": []}, "text"),
        ({"text": "a", "tokens": [1]}, "text"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [10**9]}, "tokens"),
        ({"text": "x" * 600}, "text"),
        ({"tokens": ["a"]}, "tokens"),
        ({"text": "a", "learn": False}, "learn"),
        ({"text": "\ud800"}, "text"),
    ],
)
def test_what_cannot_be_read_is_refused_by_both_routes(http, body, param):
    for route in ("ingest", "score"):
        headers = {"content-type": "application/json"}
        response = http.post(f"/v1/sessions/a/{route}", content=json.dumps(body), headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_score_tells_the_surprise_of_each_token_in_both_arms_and_keeps_nothing(http, engine):
    ingest(http, text="hello")
    before = committed(engine, "a")
    scores = http.post("/v1/sessions/a/score", json={"text": TEXT}).json()
    assert "".join(scores["pieces"]) == TEXT
    assert scores["tokens"] == list(TOKENIZER.encode(TEXT))
    for arm, learn in (("learning", "dry_run"), ("frozen", False)):
        expected = engine.score(tuple(scores["tokens"]), "a", learn=learn)
        assert scores["arms"][arm]["surprise"] == pytest.approx(list(expected))
        assert scores["arms"][arm]["mean"] == pytest.approx(float(np.mean(expected)))
    assert scores["arms"]["learning"] != scores["arms"]["frozen"]
    assert committed(engine, "a").state is before.state


def test_a_score_without_anything_before_has_null_for_its_first_token(http):
    arm = http.post("/v1/sessions/a/score", json={"text": "the", "arms": ["frozen"]}).json()["arms"]
    assert arm == {"frozen": {"mean": None, "surprise": [None]}}


def test_a_score_of_one_arm_runs_one(http):
    scores = http.post("/v1/sessions/a/score", json={"text": TEXT, "arms": ["learning", "learning"]}).json()
    assert list(scores["arms"]) == ["learning"]
    assert math.isfinite(scores["arms"]["learning"]["mean"])
    for arms in ([], ["other"]):
        assert http.post("/v1/sessions/a/score", json={"text": TEXT, "arms": arms}).status_code == 400


def test_arms_are_of_one_version_or_the_score_is_refused(http, engine):
    engine.backend.delay_s = 0.05
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{http.base_url}/v1/sessions/a/score", json={"text": TEXT}, timeout=60)
        )
    )
    thread.start()
    until(lambda: engine.scheduler.load()[0])
    http.post("/v1/sessions/a/reset").raise_for_status()
    thread.join(60)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "session_version_conflict")
