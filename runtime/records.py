"""What is known of sessions besides their memory, in one SQLite database: versions, settings, receipts, provenance."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import StoreError
from fednl_runtime.history import Mark
from fednl_runtime.session import SessionKey

FORMAT = 1
RECEIPT_S = 24 * 3600
"""Seconds for which a committed turn is known under its key."""
MAX_UPDATES = 1000
"""Entries of a session's provenance log, and its receipts; the oldest go first."""
SCHEMA = """
create table session (owner text, id text, head integer not null, settings text not null, created real not null,
  used real not null, primary key (owner, id)) strict, without rowid;
create table mark (owner text, id text, version integer, content integer not null, data text not null,
  primary key (owner, id, version), foreign key (owner, id) references session on delete cascade) strict, without rowid;
create table receipt (owner text, id text, version integer, retry_key text, digest text not null, created real not null,
  data text not null, primary key (owner, id, version),
  foreign key (owner, id) references session on delete cascade) strict, without rowid;
create table provenance (owner text, id text, version integer, data text not null, primary key (owner, id, version),
  foreign key (owner, id) references session on delete cascade) strict, without rowid;
create table deletion (created real not null) strict;
"""
SCRUB_SHARE = 0.05
"""Share of the time that scrubbing may take while sessions are being deleted."""
PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON", "busy_timeout = 5000")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user may set of a session.

    `frozen`: the slow levels learn nothing more, the conversation goes on. `sync`: its text may train
    the rules on this device. `ttl_s`: seconds after its last use at which it is deleted, None for never.
    """

    frozen: bool = False
    sync: bool = True
    ttl_s: float | None = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Record:
    """A session without its memory: its versions, oldest first, and what was set."""

    key: SessionKey
    marks: tuple[Mark, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)
    created: float = 0.0
    used: float = 0.0

    @property
    def head(self) -> Mark:
        """The committed version."""
        return self.marks[-1] if self.marks else Mark()

    def expired(self, now: float) -> bool:
        """Whether the session has outlived its time."""
        return self.settings.ttl_s is not None and now > self.used + self.settings.ttl_s


@dataclasses.dataclass(frozen=True)
class Update:
    """An entry of the provenance log: what made a version, and how much was learnt.

    `kind` is turn, rollback, reset, fork or import. `tokens` were read, `update_norm` is the Frobenius
    norm of the change of the slow memories, `surprise` the mean over the prompt in nats.
    """

    version: int
    kind: str
    created: float
    tokens: int = 0
    update_norm: float = 0.0
    surprise: float | None = None
    frozen: bool = False
    request_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Receipt:
    """A committed turn's answer, kept so that a retry gets it again instead of teaching the session twice.

    `digest` is of the request, `retry_key` what its caller named it, if anything; `data` is the answer as JSON,
    empty when it is kept no longer: then a retry cannot be answered, but teaches nothing either.
    """

    version: int
    digest: str
    data: str
    retry_key: str | None = None
    created: float = 0.0


class Records:
    """The database; safe to use from several threads."""

    def __init__(self, path: Path | None) -> None:
        """Open or create it, in memory without `path`. Raises StoreError."""
        self._in_memory, self._scrub_after = path is None, 0.0
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened, _storing("opened"):
            if path is not None:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._db = opened.enter_context(contextlib.closing(_connect(path)))
            self._prepare()
            # Whoever reads does not wait for a commit to reach the disk.
            self._reader = self._db if path is None else opened.enter_context(contextlib.closing(_connect(path)))
            self._reading = self._lock if path is None else threading.Lock()
            self.scrub(patient=False)  # of sessions that were deleted before the process was killed
            (sessions,) = self._db.execute("select count(*) from session").fetchone()
            self._counts = sessions, len(self.contents())
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Scrub and close the database; nothing may be asked of it afterwards."""
        with contextlib.suppress(StoreError):  # it is scrubbed when it is opened again
            self.scrub(patient=False)
        with self._lock:
            self._opened.close()

    def get(self, key: SessionKey) -> Record | None:
        """What is known of a session, None if it does not exist."""
        query = "select settings, created, used from session where owner = ? and id = ?"
        with self._read() as db:
            row = db.execute(query, key).fetchone()
            marks = db.execute("select data from mark where owner = ? and id = ? order by version", key).fetchall()
        if row is None:
            return None
        return Record(key, tuple(Mark.from_json(m) for (m,) in marks), Settings(**json.loads(row[0])), *row[1:])

    def keys(self, owner: str, after: str, limit: int) -> list[SessionKey]:
        """The sessions of an owner by name that have not expired, at most `limit` of those that follow `after`."""
        alive = "ifnull(used + json_extract(settings, '$.ttl_s') >= ?, true)"
        query = f"select id from session where owner = ? and id > ? and {alive} order by id limit ?"
        with self._read() as db:
            return [SessionKey(owner, name) for (name,) in db.execute(query, (owner, after, time.time(), limit))]

    def expired(self, now: float) -> list[SessionKey]:
        """The sessions that have outlived their time."""
        query = "select owner, id from session where used + json_extract(settings, '$.ttl_s') < ?"
        with self._read() as db:
            return [SessionKey(*row) for row in db.execute(query, (now,))]

    def contents(self) -> list[tuple[str, str, int]]:
        """Owner, name and version of every memory that a version refers to."""
        with self._read() as db:
            return db.execute("select distinct owner, id, content from mark where content > 0").fetchall()

    def counts(self) -> tuple[int, int]:
        """Number of sessions, and of different memories that their versions refer to."""
        with self._lock:
            return self._counts

    def receipt(self, key: SessionKey, retry_key: str | None) -> Receipt | None:
        """The receipt under `retry_key`, or the last one if that is None; None if there is none or it is too old."""
        named = "and retry_key = ?" if retry_key is not None else ""
        query = f"select version, digest, data, retry_key, created from receipt where owner = ? and id = ? {named}"
        values = (*key, *([retry_key] if retry_key is not None else []), time.time() - RECEIPT_S)
        with self._read() as db:
            row = db.execute(f"{query} and created > ? order by version desc limit 1", values).fetchone()
        return None if row is None else Receipt(*row)

    def updates(self, key: SessionKey, after: int, limit: int) -> list[Update]:
        """The provenance log, oldest first, of versions above `after`."""
        query = "select data from provenance where owner = ? and id = ? and version > ? order by version limit ?"
        with self._read() as db:
            return [Update(**json.loads(data)) for (data,) in db.execute(query, (*key, after, limit))]

    def commit(self, record: Record, update: Update | None = None, receipt: Receipt | None = None) -> None:
        """Store a record whole, with what made it, in one transaction. Raises StoreError."""
        key = record.key
        with self._write(key) as db:
            db.execute(
                "insert into session values (?, ?, ?, ?, ?, ?) on conflict do update set "
                "head = excluded.head, settings = excluded.settings, used = excluded.used",
                (*key, record.head.version, _dump(record.settings), record.created, record.used),
            )
            kept = [mark.version for mark in record.marks]
            marks = ", ".join(map(str, kept))
            db.execute(f"delete from mark where owner = ? and id = ? and version not in ({marks})", key)
            db.executemany(
                "insert or replace into mark values (?, ?, ?, ?, ?)",
                [(*key, mark.version, mark.content, _dump(mark)) for mark in record.marks],
            )
            if update is not None:
                db.execute("insert into provenance values (?, ?, ?, ?)", (*key, update.version, _dump(update)))
                oldest = update.version - MAX_UPDATES
                db.execute("delete from provenance where owner = ? and id = ? and version <= ?", (*key, oldest))
            _forget_receipts(db, record)
            if receipt is not None:
                values = (receipt.version, receipt.retry_key, receipt.digest, receipt.created, receipt.data)
                db.execute("insert into receipt values (?, ?, ?, ?, ?, ?, ?)", (*key, *values))
            crash_point("records_before_commit")
        crash_point("records_after_commit")

    def delete(self, key: SessionKey) -> bool:
        """Forget a session; say whether there was one. Its bytes are in the file until `scrub`. Raises StoreError."""
        with self._write(key) as db:
            found = db.execute("delete from session where owner = ? and id = ?", key).rowcount > 0
            db.execute("insert into deletion values (?)", (time.time(),))
            crash_point("delete_before_commit")
        crash_point("delete_after_commit")
        return found

    def scrub(self, patient: bool = True) -> None:
        """Leave no byte of deleted sessions in the files, if there may be any. Raises StoreError.

        The whole database is written anew for it; while that takes more than SCRUB_SHARE of the time,
        it is left to a later call if `patient`.
        """
        with self._lock, _storing("written"):
            began = time.monotonic()
            if self._in_memory or (patient and began < self._scrub_after):
                return
            if not self._db.execute("select exists (select * from deletion)").fetchone()[0]:
                return
            # secure_delete clears what is deleted, but not the copies that stay where rows were moved from.
            self._db.execute("vacuum")
            self._db.execute("delete from deletion")
            self._db.execute("pragma wal_checkpoint(TRUNCATE)").fetchall()
            now = time.monotonic()
            self._scrub_after = now + (now - began) / SCRUB_SHARE

    @contextlib.contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, _storing("read"):
            yield self._reader

    @contextlib.contextmanager
    def _write(self, key: SessionKey) -> Iterator[sqlite3.Connection]:
        """A transaction on what is known of one session."""
        with self._lock, _storing("written"):
            self._db.execute("begin immediate")
            try:
                before = self._count(key)
                yield self._db
                after = self._count(key)
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:  # some errors end it, some leave it open
                    self._db.execute("rollback")
                raise
            sessions, contents = self._counts
            self._counts = sessions + after[0] - before[0], contents + after[1] - before[1]

    def _count(self, key: SessionKey) -> tuple[int, int]:
        """Whether the session is there, and the number of memories that its versions refer to."""
        there = "select count(*) from session where owner = ? and id = ?"
        contents = "select count(distinct content) from mark where owner = ? and id = ? and content > 0"
        return self._db.execute(there, key).fetchone()[0], self._db.execute(contents, key).fetchone()[0]

    def _prepare(self) -> None:
        """Set the database up, unless another version of this package did. Raises StoreError, sqlite3.Error."""
        (found,) = self._db.execute("pragma user_version").fetchone()
        if found not in (0, FORMAT):
            raise StoreError("The sessions were kept by a newer version. Upgrade fednl-runtime.")
        for pragma in PRAGMAS:
            self._db.execute(f"pragma {pragma}")
        if found == 0:
            self._db.executescript(f"begin; {SCHEMA} pragma user_version = {FORMAT}; commit;")


def _connect(path: Path | None) -> sqlite3.Connection:
    return sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)


def _forget_receipts(db: sqlite3.Connection, record: Record) -> None:
    """Drop the answers of versions that are kept no longer, and what is known of old turns."""
    oldest = min((mark.version for mark in record.marks), default=0)
    ours = "where owner = ? and id = ? and"
    db.execute(
        f"delete from receipt {ours} (created < ? or version <= ? or (version < ? and retry_key is null))",
        (*record.key, record.used - RECEIPT_S, record.head.version - MAX_UPDATES, oldest),
    )
    db.execute(f"update receipt set data = '' {ours} version < ? and data != ''", (*record.key, oldest))


def _dump(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value))


@contextlib.contextmanager
def _storing(what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"The session database cannot be {what} ({error}). Make room, or mend its folder.") from error
