"""Laws of the session store: versions, names, forks and late commits, in memory and in a folder."""

from __future__ import annotations

import dataclasses

import pytest
from stores import EMPTY, KEY, OTHER, began, commit, files, head, learnt, write
from turns import bits

from fednl_runtime.errors import (
    SessionExistsError,
    SessionNotFoundError,
    SnapshotNotFoundError,
    StateError,
    VersionConflictError,
)
from fednl_runtime.records import Settings
from fednl_runtime.session import SessionKey
from fednl_runtime.store import SessionStore


def test_a_commit_is_found_again_bit_for_bit(store: SessionStore) -> None:
    [memory] = write(store)
    store._vault.resident.drop(KEY)
    assert head(store) == memory


def test_the_position_and_the_version_of_a_commit_are_found_again(store: SessionStore) -> None:
    write(store, turns=3)
    store._vault.resident.drop(KEY)
    session = began(store)
    assert (session.version, session.tokens_seen, session.tail) == (3, 15, b"\xe2")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_rollback_to_a_version_restores_it_bit_for_bit_under_a_new_number(store: SessionStore, version: int) -> None:
    memories = write(store, turns=3)
    record = store.rollback(KEY, version)
    assert record.head.version == 4
    assert head(store) == memories[version - 1]


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_rollback_of_some_turns_restores_what_was_before_them(store: SessionStore, turns: int) -> None:
    memories = [EMPTY, *write(store, turns=3)]
    store.rollback(KEY, turns=turns)
    assert head(store) == memories[-1 - turns]


def test_rollback_to_a_name_restores_it(store: SessionStore) -> None:
    [named] = write(store)
    store.snapshot(KEY, "before lunch")
    write(store, turns=2)
    store.rollback(KEY, "before lunch")
    assert head(store) == named


def test_undoing_again_and_again_walks_down_to_nothing_and_no_further(store: SessionStore) -> None:
    memories = [EMPTY, *write(store, turns=3)]
    for memory in memories[-2::-1]:
        store.rollback(KEY)
        assert head(store) == memory
    with pytest.raises(SnapshotNotFoundError, match="fewer than 1"):
        store.rollback(KEY)


def test_undoing_after_a_turn_on_an_undone_version_goes_back_to_where_that_turn_began(store: SessionStore) -> None:
    first, _ = write(store, turns=2)
    store.rollback(KEY)
    write(store)
    store.rollback(KEY)
    assert head(store) == first


def test_more_turns_than_there_were_cannot_be_undone(store: SessionStore) -> None:
    [memory] = write(store)
    with pytest.raises(SnapshotNotFoundError, match="fewer than 2"):
        store.rollback(KEY, turns=2)
    assert head(store) == memory


def test_a_reset_session_has_read_nothing_and_undoing_brings_all_back(store: SessionStore) -> None:
    *_, memory = write(store, turns=2)
    assert store.reset(KEY).head.version == 3
    assert head(store) == EMPTY
    store.rollback(KEY)
    assert head(store) == memory


@pytest.mark.parametrize("to", [7, "never"])
def test_what_is_not_kept_cannot_be_gone_back_to(store: SessionStore, to: int | str) -> None:
    write(store)
    with pytest.raises(SnapshotNotFoundError, match="keeps 1"):
        store.rollback(KEY, to)


def test_every_change_of_a_session_that_is_not_there_says_so(store: SessionStore) -> None:
    changes = (store.get, store.rollback, store.reset, store.export, store.delete, store.updates)
    for change in changes:
        with pytest.raises(SessionNotFoundError, match="'name'"):
            change(KEY)
    with pytest.raises(SessionNotFoundError, match="'name'"):
        store.fork(KEY, "other")
    assert store.stats()["sessions"] == 0


def test_a_fork_has_the_memory_and_the_history_of_its_origin(store: SessionStore) -> None:
    memories = write(store, turns=3)
    store.fork(KEY, "other")
    assert head(store, OTHER) == memories[2]
    store.rollback(OTHER, 1)
    assert head(store, OTHER) == memories[0]


def test_a_fork_of_an_older_version_goes_on_from_there(store: SessionStore) -> None:
    memories = write(store, turns=3)
    assert store.fork(KEY, "other", 2).head.version == 2
    assert head(store, OTHER) == memories[1]


def test_a_fork_and_its_origin_go_separate_ways(store: SessionStore) -> None:
    write(store, turns=2)
    store.fork(KEY, "other")
    [here], [there] = write(store), write(store, OTHER)
    assert (head(store), head(store, OTHER)) == (here, there)
    store.delete(KEY)
    store._vault.resident.drop(OTHER)
    assert head(store, OTHER) == there
    store.rollback(OTHER)


def test_a_fork_never_replaces_a_session(store: SessionStore) -> None:
    write(store)
    [memory] = write(store, OTHER)
    with pytest.raises(SessionExistsError, match="'other'"):
        store.fork(KEY, "other")
    assert head(store, OTHER) == memory


def test_a_session_cannot_be_forked_onto_itself(store: SessionStore) -> None:
    write(store)
    with pytest.raises(SessionExistsError):
        store.fork(KEY, KEY.id)


def test_an_empty_session_can_be_forked(store: SessionStore) -> None:
    store.create(KEY, Settings())
    store.fork(KEY, "other")
    assert head(store, OTHER) == EMPTY


def test_an_exported_session_is_imported_bit_for_bit(store: SessionStore) -> None:
    memories = write(store, turns=3)
    record = store.import_(OTHER, store.export(KEY))
    assert (record.head.version, head(store, OTHER)) == (1, memories[-1])
    store._vault.resident.drop(OTHER)
    assert head(store, OTHER) == memories[-1]


def test_an_exported_empty_session_is_imported(store: SessionStore) -> None:
    store.create(KEY, Settings())
    store.import_(OTHER, store.export(KEY))
    assert head(store, OTHER) == EMPTY


def test_a_damaged_file_is_not_imported_and_leaves_nothing(store: SessionStore) -> None:
    write(store)
    data = bytearray(store.export(KEY))
    data[-1] ^= 1
    before = store.stats()
    with pytest.raises(StateError):
        store.import_(OTHER, bytes(data))
    assert store.stats() == before
    assert files(store) == 1


def test_a_commit_on_an_older_head_is_refused_and_changes_nothing(store: SessionStore) -> None:
    base = began(store)
    [memory] = write(store)
    with pytest.raises(VersionConflictError, match="version 1"):
        commit(store, learnt(base, seed=9))
    assert (head(store), files(store)) == (memory, 1)
    assert store.stats()["conflicts"] == 1


@pytest.mark.parametrize("change", ["rollback", "reset"])
def test_a_commit_after_a_rollback_or_a_reset_is_refused(store: SessionStore, change: str) -> None:
    write(store, turns=2)
    base = began(store)
    getattr(store, change)(KEY)
    expected = head(store)
    with pytest.raises(VersionConflictError, match="version 3"):
        commit(store, learnt(base))
    assert head(store) == expected


def test_a_session_deleted_during_its_first_turn_stays_deleted(store: SessionStore) -> None:
    store.create(KEY, Settings(metadata={"mine": "yes"}))
    base = began(store)
    store.delete(KEY)
    with pytest.raises(SessionNotFoundError, match="deleted while"):
        commit(store, learnt(base))
    assert (store.stats()["sessions"], files(store)) == (0, 0)


def test_a_turn_of_a_deleted_session_is_not_committed_to_a_later_one_of_its_name(store: SessionStore) -> None:
    write(store)
    base, file = began(store), store.export(KEY)
    store.delete(KEY)
    imported = store.import_(KEY, file)
    assert imported.head.version == base.version
    with pytest.raises(SessionNotFoundError, match="deleted while"):
        commit(store, learnt(base))
    assert store.get(KEY) == imported


def test_a_memory_read_while_its_session_is_deleted_does_not_stay(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, turns=2)
    [_, other] = write(store, OTHER, turns=2)
    record, read = store.get(KEY), store._vault.files.read
    store._vault.resident.drop(KEY)

    def slowly(name: str, max_bytes: int) -> bytes:
        data = read(name, max_bytes)
        store.delete(KEY)
        return data

    monkeypatch.setattr(store._vault.files, "read", slowly)
    store.load(record, record.head)
    monkeypatch.undo()
    assert not store._vault.resident.holds(KEY, 2)
    store.fork(OTHER, KEY.id)
    assert head(store) == other


def test_a_session_deleted_before_its_memory_is_read_is_not_found(store: SessionStore) -> None:
    write(store)
    record = store.get(KEY)
    store.delete(KEY)
    with pytest.raises(SessionNotFoundError, match="just now"):
        store.load(record, record.head)


def test_a_fork_does_not_see_the_memory_of_a_deleted_session_of_its_name(store: SessionStore) -> None:
    [old, memory] = [*write(store, OTHER), *write(store)]
    stale = began(store, OTHER)
    store.delete(OTHER)
    store._vault.resident.put(OTHER, 1, stale)
    store.fork(KEY, OTHER.id)
    assert head(store, OTHER) == memory != old


def test_owners_never_meet(store: SessionStore) -> None:
    mine, yours = SessionKey("me", "name"), SessionKey("you", "name")
    [memory] = write(store, mine)
    with pytest.raises(SessionNotFoundError):
        store.get(yours)
    assert bits(began(store, yours)) == EMPTY
    write(store, yours, turns=2)
    assert (head(store, mine), store.get(mine).head.version) == (memory, 1)
    assert [record.key for record in store.page("me")] == [mine]
    store.delete(yours)
    assert head(store, mine) == memory


def test_names_that_join_to_the_same_text_are_different_sessions(store: SessionStore) -> None:
    keys = [SessionKey("a/b", "c"), SessionKey("a", "b/c"), SessionKey("a\0b", "c"), SessionKey("a", "b\0c")]
    memories = [commit(store, learnt(began(store, key), seed=i)) for i, key in enumerate(keys)]
    for key in keys:
        store._vault.resident.drop(key)
    assert [head(store, key) for key in keys] == memories


def test_settings_outlive_turns_and_rollbacks(store: SessionStore) -> None:
    settings = Settings(frozen=True, sync=False, metadata={"note": "mine"})
    write(store, turns=2)
    store.configure(KEY, **dataclasses.asdict(settings))
    write(store)
    assert store.rollback(KEY).settings == settings
    assert store.fork(KEY, "other").settings == settings


def test_pages_are_in_order_of_names_and_follow_each_other(store: SessionStore) -> None:
    names = [f"s{i:02}" for i in (3, 1, 4, 0, 2)]
    for name in names:
        store.create(SessionKey("owner", name), Settings())
    first = [record.key.id for record in store.page("owner", limit=3)]
    rest = [record.key.id for record in store.page("owner", after=first[-1], limit=3)]
    assert first + rest == sorted(names)


def test_every_version_says_what_made_it(store: SessionStore) -> None:
    write(store, turns=2)
    store.rollback(KEY)
    store.reset(KEY)
    store.fork(KEY, "other")
    store.import_(SessionKey("owner", "third"), store.export(KEY))
    kinds = [(update.version, update.kind) for update in store.updates(KEY)]
    assert kinds == [(1, "turn"), (2, "turn"), (3, "rollback"), (4, "reset")]
    assert [update.version for update in store.updates(KEY, after=2, limit=1)] == [3]
    assert [(update.version, update.kind) for update in store.updates(OTHER)] == [(4, "fork")]
    assert [update.kind for update in store.updates(SessionKey("owner", "third"))] == ["import"]


def test_a_store_can_be_closed_twice(store: SessionStore) -> None:
    store.close()
    store.close()
