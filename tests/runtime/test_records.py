"""Laws of the session database: transactions, counts, receipts, formats, and bytes that are really gone."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import contents

from fednl_runtime.errors import StoreError
from fednl_runtime.history import Mark
from fednl_runtime.records import MAX_UPDATES, RECEIPT_S, Receipt, Record, Records, Settings, Update
from fednl_runtime.session import SessionKey

KEY = SessionKey("owner", "name")
NOW = 1_000_000.0


class Failing:
    """A connection that refuses one statement."""

    def __init__(self, db: sqlite3.Connection, statement: str) -> None:
        self._db, self._statement = db, statement

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith(self._statement):
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.fixture(name="records")
def records_fixture(tmp_path: Path) -> Iterator[Records]:
    records = Records(tmp_path / "sessions.db")
    yield records
    records.close()


def record(*versions: int, key: SessionKey = KEY, used: float = NOW, **settings: Any) -> Record:
    """A session that keeps these versions, each with a memory of its own."""
    marks = tuple(Mark(version, version, version - 1, created=used) for version in versions)
    return Record(key, marks, Settings(**settings), created=NOW, used=used)


def update(version: int, **fields: Any) -> Update:
    return Update(version, "turn", NOW, **fields)


def receipt(version: int, key: str | None = None, created: float | None = None) -> Receipt:
    return Receipt(version, f"digest {version}", "[]", key, time.time() if created is None else created)


def recount(records: Records) -> tuple[int, int]:
    """The counts, the slow way."""
    with records._read() as db:
        (sessions,) = db.execute("select count(*) from session").fetchone()
    return sessions, len(records.contents())


def test_a_record_is_found_as_it_was_committed(records: Records) -> None:
    told = record(3, 4, frozen=True, metadata={"née": "\0 €"}, ttl_s=1.5)
    records.commit(told, update(4, surprise=0.1 + 0.2, request_id="r"))
    assert records.get(KEY) == told
    assert records.updates(KEY, -1, 10) == [update(4, surprise=0.1 + 0.2, request_id="r")]


def test_records_are_found_again_after_closing(records: Records, tmp_path: Path) -> None:
    records.commit(record(1, 2), update(2), receipt(2, "k"))
    records.close()
    again = Records(tmp_path / "sessions.db")
    assert (again.get(KEY), again.counts()) == (record(1, 2), (1, 2))
    assert again.receipt(KEY, "k") is not None
    again.close()


@pytest.mark.parametrize("statement", ["commit", "insert into session", "insert into receipt", "delete from mark"])
def test_a_transaction_that_fails_leaves_everything_as_it_was_and_the_next_goes_on(
    records: Records, statement: str
) -> None:
    records.commit(record(1), update(1))
    db = records._db
    records._db = Failing(db, statement)  # type: ignore[assignment]
    with pytest.raises(StoreError, match="disk is full"):
        records.commit(record(1, 2), update(2), receipt(2))
    records._db = db
    assert (records.get(KEY), records.counts()) == (record(1), (1, 1))
    records.commit(record(1, 2), update(2), receipt(2))
    assert records.get(KEY) == record(1, 2)


def test_a_delete_that_fails_leaves_the_session(records: Records) -> None:
    records.commit(record(1))
    db = records._db
    records._db = Failing(db, "commit")  # type: ignore[assignment]
    with pytest.raises(StoreError):
        records.delete(KEY)
    records._db = db
    assert records.counts() == (1, 1)
    assert records.delete(KEY)
    assert records.counts() == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4)), st.booleans()), max_size=12))
def test_the_counts_are_those_of_the_rows(steps: list[tuple[int, set[int], bool]]) -> None:
    records = Records(None)
    for name, versions, keep in steps:
        key = SessionKey("owner", str(name))
        if keep:
            records.commit(record(*sorted(versions), key=key))
        else:
            records.delete(key)
        assert records.counts() == recount(records)
    records.close()


def test_the_receipt_of_a_key_or_the_last_one_is_found(records: Records) -> None:
    for version, key in ((1, "one"), (2, None), (3, "three"), (4, None)):
        records.commit(record(*range(1, version + 1)), update(version), receipt(version, key))
    found = [records.receipt(KEY, key) for key in ("one", "three", None)]
    assert [r and r.version for r in found] == [1, 3, 4]
    assert records.receipt(KEY, "two") is None
    assert records.receipt(SessionKey("other", "name"), "one") is None


def test_a_receipt_is_forgotten_after_a_day(records: Records) -> None:
    records.commit(record(1), update(1), receipt(1, "k", time.time() - RECEIPT_S - 1))
    assert records.receipt(KEY, "k") is None


def test_answers_go_with_their_versions_and_keys_stay(records: Records) -> None:
    for version in range(1, 6):
        records.commit(
            record(*range(max(1, version - 1), version + 1)),
            update(version),
            receipt(version, f"k{version}" if version != 2 else None),
        )
    with records._read() as db:
        told = db.execute("select version, data from receipt order by version").fetchall()
    assert told == [(1, ""), (3, ""), (4, "[]"), (5, "[]")]


def test_the_receipts_of_a_session_are_bounded(records: Records) -> None:
    for version in (1, 2, MAX_UPDATES + 1):
        records.commit(record(version), update(version), receipt(version, f"k{version}"))
    assert [records.receipt(KEY, f"k{version}") is None for version in (1, 2)] == [True, False]


def test_the_provenance_log_is_bounded(records: Records) -> None:
    for version in (1, 2, MAX_UPDATES + 1):
        records.commit(record(version), update(version))
    assert [u.version for u in records.updates(KEY, -1, 10)] == [2, MAX_UPDATES + 1]


def test_sessions_expire_by_their_last_use(records: Records) -> None:
    for name, ttl in (("a", 10.0), ("b", 20.0), ("c", None)):
        records.commit(record(1, key=SessionKey("owner", name), ttl_s=ttl))
    assert records.expired(NOW + 9) == []
    assert records.expired(NOW + 11) == [SessionKey("owner", "a")]
    assert len(records.expired(NOW + 1e9)) == 2


def test_a_database_of_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with sqlite3.connect(path) as db:
        db.execute("pragma user_version = 2")
        db.execute("create table future (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="Upgrade"):
        Records(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_and_a_link_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.write_bytes(b"this is not a database " * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Records(path)
    path.rename(tmp_path / "real.db")
    path.symlink_to(tmp_path / "real.db")
    with pytest.raises(StoreError, match="cannot be opened"):
        Records(path)


def test_the_database_is_its_owners_alone(records: Records, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        records.commit(record(1))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}
    assert "sessions.db-wal" in modes


def test_no_byte_of_a_deleted_session_is_left_in_the_files(records: Records, tmp_path: Path) -> None:
    rng = random.Random(5)
    alive: set[str] = set()
    for step in range(300):
        name = f"canary-{rng.randrange(40):03}-"
        key = SessionKey("owner", name)
        if name in alive and rng.random() < 0.4:
            records.delete(key)
            alive.discard(name)
            continue
        noise = name * rng.randrange(1, 200)
        version = step + 1
        told = record(version, key=key, metadata={"note": noise})
        records.commit(told, update(version, request_id=noise), Receipt(version, name, noise, name, time.time()))
        alive.add(name)
    records.scrub(patient=False)
    left = contents(tmp_path)
    assert {f"canary-{i:03}-" for i in range(40) if f"canary-{i:03}-".encode() in left} == alive


def test_what_a_killed_process_deleted_is_scrubbed_when_the_database_is_opened(
    records: Records, tmp_path: Path
) -> None:
    records.commit(record(1, metadata={"note": "canary"}))
    records.delete(KEY)
    assert b"canary" in contents(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tmp_path.glob("sessions.db*"):
        (copy / path.name).write_bytes(path.read_bytes())
    again = Records(copy / "sessions.db")
    assert b"canary" not in contents(copy)
    again.close()


def test_scrubbing_takes_a_bounded_share_of_the_time_and_closing_does_what_was_put_off(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 20.9, 21.1, 21.2, 50.0, 50.0])  # the first scrub takes a second
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for canary, left in (("one", False), ("two", True), ("three", False)):
        records.commit(record(1, metadata={"note": f"canary-{canary}"}))
        records.delete(KEY)
        records.scrub()
        assert (b"canary" in contents(tmp_path)) == left
    records.commit(record(1, metadata={"note": "canary-four"}))
    records.delete(KEY)
    records.close()
    assert b"canary" not in contents(tmp_path)
