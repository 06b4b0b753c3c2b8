"""Laws of what a session store keeps: versions, named ones, room and time; in memory and in a folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engines import running_engine
from models import TINY
from stores import EMPTY, FORM, KEY, OTHER, began, files, head, limited, write
from turns import bits, say

from fednl_runtime.errors import (
    SessionExistsError,
    SessionLimitError,
    SessionNotFoundError,
    SnapshotNotFoundError,
)
from fednl_runtime.records import Settings
from fednl_runtime.session import SessionKey
from fednl_runtime.store import SessionStore
from fednl_runtime.vault import StoreLimits

MINE = SessionKey("", "a")
"""The session of `say`."""


@pytest.fixture(name="clock")
def clock_fixture(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds to add to the time of day."""
    ahead, now = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    return ahead


def test_only_the_last_versions_are_kept_with_the_files_of_no_other() -> None:
    store = SessionStore(FORM, StoreLimits(versions=3))
    write(store, turns=9)
    assert [mark.version for mark in store.get(KEY).marks] == [7, 8, 9]
    assert files(store) == 3


def test_a_single_version_is_all_that_is_kept_if_so_set() -> None:
    store = SessionStore(FORM, StoreLimits(versions=1))
    write(store, turns=3)
    assert (len(store.get(KEY).marks), files(store)) == (1, 1)


def test_a_snapshot_is_kept_beyond_retention_until_its_name_is_dropped() -> None:
    store = SessionStore(FORM, StoreLimits(versions=2))
    [named] = write(store)
    store.snapshot(KEY, "first")
    write(store, turns=5)
    assert files(store) == 3
    store.rollback(KEY, "first")
    assert head(store) == named
    write(store, turns=2)
    store.drop_snapshot(KEY, "first")
    assert files(store) == 2
    with pytest.raises(SnapshotNotFoundError):
        store.rollback(KEY, "first")


def test_a_memory_is_kept_as_long_as_any_version_refers_to_it() -> None:
    store = SessionStore(FORM, StoreLimits(versions=2))
    first, _ = write(store, turns=2)
    store.rollback(KEY, 1)
    store.rollback(KEY)
    store.reset(KEY)
    store.rollback(KEY)
    assert head(store) == EMPTY
    assert files(store) == 0
    assert first != EMPTY


def test_a_name_is_given_once_and_names_are_limited() -> None:
    store = SessionStore(FORM, StoreLimits(snapshots=2))
    write(store)
    store.snapshot(KEY, "one")
    with pytest.raises(SessionExistsError, match="'one'"):
        store.snapshot(KEY, "one")
    write(store)
    store.snapshot(KEY, "two")
    write(store)
    with pytest.raises(SessionLimitError, match="2 snapshots"):
        store.snapshot(KEY, "three")


def test_a_second_name_does_not_take_the_first_from_its_version() -> None:
    store = SessionStore(FORM, StoreLimits())
    write(store)
    store.snapshot(KEY, "one")
    with pytest.raises(SessionExistsError, match="'one'"):
        store.snapshot(KEY, "two")
    assert store.get(KEY).head.name == "one"


def test_a_session_is_gone_after_its_time_and_every_use_prolongs_it(store: SessionStore, clock: list[float]) -> None:
    store.create(KEY, Settings(ttl_s=60))
    for _ in range(3):
        clock[0] += 50
        write(store)
    clock[0] += 61
    with pytest.raises(SessionNotFoundError):
        store.get(KEY)
    assert store.page("owner") == []
    assert store.sweep() == 1
    assert (files(store), store.stats()["sessions"]) == (0, 0)


def test_a_turn_that_keeps_nothing_prolongs_a_session_too(clock: list[float]) -> None:
    with running_engine() as engine:
        engine.sessions.create(MINE, Settings(ttl_s=60))
        say(engine)
        for _ in range(3):
            clock[0] += 50
            say(engine, learn=False)
        assert engine.sessions.get(MINE).head.version == 1
        clock[0] += 61
        say(engine, learn=False)
        with pytest.raises(SessionNotFoundError):
            engine.sessions.get(MINE)


def test_a_session_that_outlived_its_time_begins_anew(store: SessionStore, clock: list[float]) -> None:
    store.create(KEY, Settings(ttl_s=60, metadata={"old": "yes"}))
    write(store, turns=2)
    clock[0] += 61
    session = began(store)
    assert (session.version, bits(session)) == (0, EMPTY)
    assert store.find(KEY).settings == Settings()


def test_a_session_used_while_the_expired_are_swept_stays(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create(KEY, Settings(ttl_s=60))
    write(store)
    monkeypatch.setattr(store._vault.records, "expired", lambda now: [KEY, OTHER])  # as it was a moment ago
    assert store.sweep() == 0
    assert store.get(KEY).head.version == 1


def test_sessions_without_a_time_live_for_ever(store: SessionStore, clock: list[float]) -> None:
    write(store)
    clock[0] += 1e9
    assert store.sweep() == 0
    assert store.get(KEY)


def test_a_full_store_refuses_what_is_new_and_goes_on_with_what_is_there(folder: Path | None) -> None:
    store = limited(folder, files=4, versions=2)
    write(store, turns=2)
    write(store, OTHER, turns=2)
    third = SessionKey("owner", "third")
    refusals = (
        lambda: write(store, third),
        lambda: store.create(third, Settings()),
        lambda: store.fork(KEY, third.id),
        lambda: store.import_(third, store.export(KEY)),
        lambda: store.check_room(third),
    )
    for refused in refusals:
        with pytest.raises(SessionLimitError, match="2 sessions"):
            refused()
    write(store, turns=3)
    assert (files(store), store.stats()["versions"]) == (4, 4)
    store.delete(OTHER)
    write(store, third, turns=2)
    store.close()


def test_a_fork_that_does_not_fit_is_refused_whole(folder: Path | None) -> None:
    store = limited(folder, files=5)
    write(store, turns=3)
    with pytest.raises(SessionLimitError):
        store.fork(KEY, "other")
    assert files(store) == 3
    assert store.fork(KEY, "other", 2).head.version == 2
    store.close()


def test_snapshots_do_not_grow_a_session_beyond_the_room(folder: Path | None) -> None:
    store = limited(folder, files=3, versions=2)
    write(store)
    store.snapshot(KEY, "one")
    write(store)
    store.snapshot(KEY, "two")
    write(store)
    with pytest.raises(SessionLimitError):
        write(store)
    assert files(store) == 3
    store.close()


def test_sessions_in_memory_stay_within_their_bytes_and_come_back_from_disk(tmp_path: Path) -> None:
    one = began(SessionStore(FORM, StoreLimits())).state.nbytes + 4 * TINY.vocab_size
    store = SessionStore(FORM, StoreLimits(resident_bytes=2 * one), tmp_path)
    keys = [SessionKey("owner", f"s{i}") for i in range(5)]
    memories = [write(store, key)[0] for key in keys]
    for key, memory in zip(keys, memories, strict=True):
        assert head(store, key) == memory
        assert store.stats()["resident_bytes"] <= 2 * one
    assert store.stats()["restores"] == 5
    assert store.stats()["evictions"] >= 6
    store.close()
