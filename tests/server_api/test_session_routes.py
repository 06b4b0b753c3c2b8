"""Laws of the session routes: versions, settings, snapshots, forks, files, and whose they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from engines import committed, running_engine, until

from fednl_runtime.engine import Engine
from fednl_runtime.errors import StoreError
from fednl_runtime.records import Settings
from fednl_runtime.server_api.entrance.security import KeyRing, new_key
from fednl_runtime.server_api.sweeper import sweeping
from fednl_runtime.session import SessionKey
from fednl_runtime.store import SessionStore

FILE = {"content-type": "application/octet-stream"}
Serve = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture(autouse=True)
def fresh(engine: Engine) -> Iterator[None]:
    """Each test begins without sessions."""
    yield
    for record in engine.sessions.page("", limit=1000):
        engine.sessions.delete(record.key)


def create(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/sessions", content=json.dumps(fields), headers={"content-type": "application/json"})
    assert response.status_code == 201, response.text
    return dict(response.json())


def read(http: httpx.Client, session_id: str, text: str) -> dict[str, Any]:
    """One turn that reads a text and says nothing."""
    body = {"prompt": text, "max_tokens": 0, "session_id": session_id}
    return dict(http.post("/v1/completions", json=body).raise_for_status().json()["session"])


def refused(response: httpx.Response) -> tuple[int, str | None]:
    """Status and code of a refusal."""
    return response.status_code, response.json()["error"]["code"]


def ids(http: httpx.Client, **query: Any) -> list[str]:
    return [session["id"] for session in http.get("/v1/sessions", params=query).json()["data"]]


def test_a_session_is_made_under_the_name_and_with_the_settings_it_is_given(http):
    settings = {"frozen": True, "sync": False, "ttl_s": 60.0, "metadata": {"who": "\ud800me"}}
    made = create(http, id="a", **settings)
    assert made == http.get("/v1/sessions/a").json()
    assert {name: made[name] for name in settings} == settings
    assert (made["version"], made["tokens_seen"], made["versions"], made["persisted"]) == (0, 0, [], False)


def test_a_session_without_a_name_is_given_one_that_nobody_has(http):
    assert create(http)["id"] != create(http)["id"]
    assert len(ids(http)) == 2


def test_a_name_that_is_taken_or_not_well_formed_is_refused(http):
    create(http, id="a")
    assert refused(http.post("/v1/sessions", json={"id": "a"})) == (409, "session_exists")
    for name in ("", "../a", "a b", "-a", "a" * 129, "é"):
        response = http.post("/v1/sessions", json={"id": name})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "id")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl_s", 0),
        ("ttl_s", -1),
        ("ttl_s", "1"),
        ("frozen", None),
        ("sync", "yes"),
        ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: ""}),
        ("metadata", {"a": "b" * 513}),
        ("metadata", {str(i): "" for i in range(17)}),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_changes_nothing(http, field, value):
    before = create(http, id="a")
    response = http.patch("/v1/sessions/a", json={field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert http.get("/v1/sessions/a").json() == before


def test_settings_that_are_left_out_stay_and_null_keeps_a_session_for_ever(http):
    create(http, id="a", ttl_s=60, metadata={"a": "b"})
    changed = http.patch("/v1/sessions/a", json={"frozen": True}).json()
    assert (changed["frozen"], changed["ttl_s"], changed["metadata"]) == (True, 60, {"a": "b"})
    assert http.patch("/v1/sessions/a", json={"ttl_s": None}).json()["ttl_s"] is None


def test_a_frozen_session_goes_on_and_its_slow_memories_do_not(http, engine):
    create(http, id="a", frozen=True)
    assert read(http, "a", "the hello the hello")["update_norm"] == 0
    http.patch("/v1/sessions/a", json={"frozen": False})
    assert read(http, "a", "the hello the hello")["update_norm"] > 0


def test_pages_hold_each_session_once_and_say_whether_more_follow(http):
    names = [create(http, id=f"s{i}")["id"] for i in range(5)]
    found, after = [], ""
    while True:
        page = http.get("/v1/sessions", params={"limit": 2, "after": after}).json()
        found += [session["id"] for session in page["data"]]
        after = page["last"]
        if not page["has_more"]:
            break
    assert found == names


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x"])
def test_a_page_size_out_of_range_is_refused(http, limit):
    response = http.get("/v1/sessions", params={"limit": limit})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


def test_a_page_is_full_although_sessions_have_expired(http, engine):
    for name in "abcd":
        create(http, id=name)
    engine.sessions.configure(SessionKey("", "b"), ttl_s=1e-9)
    page = http.get("/v1/sessions", params={"limit": 2}).json()
    assert ([session["id"] for session in page["data"]], page["has_more"]) == (["a", "c"], True)


def test_a_rollback_goes_back_a_turn_some_turns_to_a_version_or_to_a_name(http, engine):
    create(http, id="a")
    states = [committed(engine, "a").state]
    for text in ("one", "two", "three", "four"):
        read(http, "a", text)
        states.append(committed(engine, "a").state)
        http.post("/v1/sessions/a/snapshots", json={"name": text})
    for body, turns in (
        ({}, 3),
        ({"turns": 2}, 1),
        ({"version": 2}, 2),
        ({"snapshot": "four"}, 4),
        ({"version": 0}, 0),
    ):
        response = http.post("/v1/sessions/a/rollback", json=body)
        assert response.json()["tokens_seen"] == int(states[turns].position[0])
        tensors = committed(engine, "a").state.tensors
        assert all(np.array_equal(tensors[name], t) for name, t in states[turns].tensors.items())


def test_a_rollback_needs_no_body_and_makes_a_new_version(http):
    create(http, id="a")
    read(http, "a", "one")
    response = http.post("/v1/sessions/a/rollback")
    assert (response.json()["version"], response.json()["tokens_seen"]) == (2, 0)
    assert (response.headers["x-session-version"], response.headers["etag"]) == ("2", 'W/"2"')


def test_a_version_that_is_not_kept_is_404_and_two_ways_to_name_one_are_400(http):
    create(http, id="a")
    read(http, "a", "one")
    for body in ({"version": 7}, {"snapshot": "no"}, {"turns": 9}):
        assert refused(http.post("/v1/sessions/a/rollback", json=body)) == (404, "snapshot_not_found")
    assert refused(http.delete("/v1/sessions/a/snapshots/no")) == (404, "snapshot_not_found")
    for body in ({"version": 1, "turns": 1}, {"version": 1, "snapshot": "x"}, {"turns": 0}, {"version": -1}):
        assert http.post("/v1/sessions/a/rollback", json=body).status_code == 400


def test_a_reset_session_has_read_nothing_and_can_be_rolled_back(http):
    create(http, id="a")
    seen = read(http, "a", "one two")["tokens_seen"]
    assert http.post("/v1/sessions/a/reset").json()["tokens_seen"] == 0
    assert http.post("/v1/sessions/a/rollback", json={"version": 1}).json()["tokens_seen"] == seen


def test_snapshots_are_listed_once_each_and_dropped_by_name(http):
    create(http, id="a")
    read(http, "a", "one")
    made = http.post("/v1/sessions/a/snapshots", json={"name": "before"})
    assert (made.status_code, made.json()["name"], made.json()["version"]) == (201, "before", 1)
    assert refused(http.post("/v1/sessions/a/snapshots", json={"name": "before"})) == (409, "session_exists")
    assert http.get("/v1/sessions/a/snapshots").json()["data"] == [made.json()]
    assert http.delete("/v1/sessions/a/snapshots/before").json()["deleted"] is True
    assert http.get("/v1/sessions/a/snapshots").json()["data"] == []


def test_a_fork_goes_its_own_way(http):
    create(http, id="a", metadata={"kind": "x"})
    seen = read(http, "a", "one")["tokens_seen"]
    read(http, "a", "two")
    fork = http.post("/v1/sessions/a/fork", json={"id": "b", "version": 1})
    assert (fork.status_code, fork.json()["id"], fork.json()["tokens_seen"]) == (201, "b", seen)
    assert fork.json()["metadata"] == {"kind": "x"}
    read(http, "b", "three")
    assert http.get("/v1/sessions/a").json()["version"] == 2
    assert refused(http.post("/v1/sessions/a/fork", json={"id": "b"})) == (409, "session_exists")
    assert len({http.post("/v1/sessions/a/fork").json()["id"] for _ in range(2)}) == 2


def test_an_exported_session_goes_on_elsewhere_as_it_would_have_gone_on(http, engine):
    create(http, id="a")
    read(http, "a", "hello the")
    file = http.get("/v1/sessions/a/export")
    assert file.headers["content-disposition"] == 'attachment; filename="a.safetensors"'
    imported = http.post("/v1/sessions/import?id=b", content=file.content, headers=FILE)
    assert (imported.status_code, imported.json()["id"]) == (201, "b")
    assert read(http, "a", " hello")["surprise"] == read(http, "b", " hello")["surprise"]


def test_a_file_that_is_damaged_foreign_or_too_large_is_refused_and_leaves_no_session(http, engine, serve):
    create(http, id="a")
    read(http, "a", "hello")
    data = http.get("/v1/sessions/a/export").content
    for bad in (b"", data[:-1], data[:100], bytes(reversed(data))):
        response = http.post("/v1/sessions/import?id=b", content=bad, headers=FILE)
        assert refused(response) == (400, "state_unusable")
    large = http.post("/v1/sessions/import?id=b", content=bytes(40 << 20), headers=FILE)
    assert refused(large) == (413, "request_too_large")
    assert ids(http) == ["a"]


def test_the_log_of_updates_tells_what_made_each_version(http):
    create(http, id="a")
    told = [read(http, "a", text) for text in ("one two", "three")]
    http.post("/v1/sessions/a/rollback")
    page = http.get("/v1/sessions/a/updates", params={"limit": 2}).json()
    rest = http.get("/v1/sessions/a/updates", params={"after": page["last"]}).json()
    assert [update["kind"] for update in page["data"] + rest["data"]] == ["turn", "turn", "rollback"]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    for update, session in zip(page["data"], told, strict=True):
        assert update["update_norm"] == session["update_norm"]
        assert update["surprise"] == session["surprise"]
        assert update["request_id"].startswith("req_")


def test_a_deleted_session_is_gone(http):
    create(http, id="a")
    assert http.delete("/v1/sessions/a").json() == {"id": "a", "object": "session.deleted", "deleted": True}
    assert refused(http.get("/v1/sessions/a")) == (404, "session_not_found")


BY_NAME = [
    ("GET", "", None),
    ("PATCH", "", {"frozen": True}),
    ("DELETE", "", None),
    ("POST", "/reset", None),
    ("POST", "/rollback", None),
    ("POST", "/fork", None),
    ("GET", "/snapshots", None),
    ("POST", "/snapshots", {"name": "x"}),
    ("DELETE", "/snapshots/x", None),
    ("GET", "/export", None),
    ("GET", "/updates", None),
    ("POST", "/ingest", {"text": "x"}),
    ("POST", "/score", {"text": "x"}),
]


@pytest.mark.parametrize(("method", "path", "body"), BY_NAME, ids=str)
def test_no_route_finds_a_session_that_is_not_there_or_can_have_no_name(http, method, path, body):
    for name in ("missing", "%2e%2e", "a%20b", "%00", "%ff"):
        response = http.request(method, f"/v1/sessions/{name}{path}", json=body)
        assert refused(response) == (404, "session_not_found")


@pytest.fixture(name="two")
def two_fixture(serve: Serve) -> Iterator[tuple[httpx.Client, httpx.Client, Engine]]:
    """Clients with two keys to one server."""
    secrets, keys = zip(*(new_key(name, ["infer", "sessions"]) for name in ("ann", "bob")), strict=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running_engine())
        address = stack.enter_context(serve(engine, keys=KeyRing(keys)))
        ann, bob = (
            stack.enter_context(httpx.Client(base_url=address, headers={"authorization": f"Bearer {secret}"}))
            for secret in secrets
        )
        yield ann, bob, engine


@pytest.mark.parametrize(("method", "path", "body"), BY_NAME, ids=str)
def test_another_keys_session_is_not_found_and_not_touched(two, method, path, body):
    ann, bob, engine = two
    create(ann, id="secret")
    read(ann, "secret", "hello")
    before = committed(engine, "secret", "ann").state
    response = bob.request(method, f"/v1/sessions/secret{path}", json=body)
    assert refused(response) == (404, "session_not_found")
    assert committed(engine, "secret", "ann").state is before
    assert ids(bob) == []


def test_two_keys_may_give_their_sessions_the_same_name(two):
    ann, bob, _ = two
    create(ann, id="same", metadata={"of": "ann"})
    create(bob, id="same", metadata={"of": "bob"})
    assert ann.get("/v1/sessions/same").json()["metadata"] == {"of": "ann"}
    bob.delete("/v1/sessions/same")
    assert "same" in ids(ann)


def test_a_running_server_deletes_what_has_outlived_its_time():
    with running_engine() as engine:
        engine.sessions.create(SessionKey("", "a"), Settings(ttl_s=0.05))

        async def watch() -> None:
            async with sweeping(engine.sessions, every_s=0.01):
                while engine.sessions.stats()["sessions"]:
                    await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(watch(), 30))


def test_a_sweep_that_fails_is_tried_again(monkeypatch):
    with running_engine() as engine:
        engine.sessions.create(SessionKey("", "a"), Settings(ttl_s=1e-9))
        sweep, calls = SessionStore.sweep, []

        def failing(store: SessionStore) -> int:
            calls.append(time.monotonic())
            if len(calls) == 1:
                raise StoreError("The disk is full.")
            return sweep(store)

        async def watch() -> None:
            async with sweeping(engine.sessions, every_s=0.01):
                while engine.sessions.stats()["sessions"]:
                    await asyncio.sleep(0.01)

        monkeypatch.setattr(SessionStore, "sweep", failing)
        asyncio.run(asyncio.wait_for(watch(), 30))
        assert len(calls) > 1


def test_the_server_sweeps_from_its_start(serve: Serve):
    with running_engine() as engine:
        engine.sessions.create(SessionKey("", "a"), Settings(ttl_s=1e-9))
        with serve(engine):
            until(lambda: not engine.sessions.stats()["sessions"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/updates?after=99999999999999999999", None),
        ("GET", "/updates?after=-2", None),
        ("PATCH", "", '{"ttl_s": 1e400}'),
        ("PATCH", "", '{"ttl_s": 1' + "0" * 400 + "}"),
        ("PATCH", "", '{"ttl_s": NaN}'),
        ("POST", "/rollback", '{"turns": 1.5}'),
        ("POST", "/ingest", '{"tokens": [99999999999999999999]}'),
        ("POST", "/ingest", '{"text": "a", "session_version": "1"}'),
        ("POST", "/snapshots", '{"name": "\\ud800"}'),
        ("POST", "/snapshots", "[]"),
        ("POST", "/score", '{"text": "\\ud800"'),
    ],
)
def test_numbers_and_text_that_cannot_be_are_refused_and_nothing_breaks(http, method, path, body):
    create(http, id="a")
    headers = {"content-type": "application/json"}
    response = http.request(method, f"/v1/sessions/a{path}", content=body, headers=headers)
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rollback", '{"version": 99999999999999999999}', 404),
        ("/rollback", '{"snapshot": "\\ud800"}', 404),
        ("/rollback", '{"turns": 99999999999999999999}', 404),
        ("/ingest", '{"text": "a", "session_version": 99999999999999999999}', 409),
    ],
)
def test_a_strange_number_or_character_has_the_answer_of_a_plain_one(http, path, body, status):
    create(http, id="a")
    response = http.post(f"/v1/sessions/a{path}", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
