"""Updates on their way: made once, kept until the endpoint has said what became of them, sent until then."""

from __future__ import annotations

import dataclasses
import hashlib
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fednl_runtime.crash import crash_point
from fednl_runtime.fed_sync.device.database import Database
from fednl_runtime.fed_sync.tensors import pack, unpack

State = Literal["pending", "sent", "accepted", "refused"]
"""Made; sent at least once and not answered; counted by the endpoint; refused by it for good."""

WAITING = "state in ('pending', 'sent')"
KEPT_SETTLED = 64
"""Settled updates that are remembered, without their bodies."""
KEPT_FORGOTTEN = 10_000
"""Forgotten sessions that are remembered, by tag; more are not forgotten while one training runs."""
SCHEMA = """
create table if not exists upload (id text primary key, base_version integer not null, num_tokens integer not null,
  body blob, bytes integer not null, sha256 text not null, created real not null, attempts integer not null default 0,
  state text not null default 'pending', code text) strict, without rowid;
create table if not exists upload_session (id text references upload on delete cascade, session text,
  primary key (id, session)) strict, without rowid;
create table if not exists residual (id integer primary key check (id = 0), schema text not null,
  body blob not null) strict;
create table if not exists residual_session (session text primary key) strict, without rowid;
create table if not exists forgotten (id integer primary key autoincrement, session text not null) strict;
create table if not exists dropped (id integer primary key check (id = 0), count integer not null) strict;
insert or ignore into dropped values (0, 0);
"""


@dataclasses.dataclass(frozen=True)
class Upload:
    """An update to be sent."""

    id: str
    base_version: int
    num_tokens: int
    body: bytes
    created: float
    attempts: int = 0

    @property
    def sha256(self) -> str:
        """Of the body, in hex."""
        return hashlib.sha256(self.body).hexdigest()


@dataclasses.dataclass(frozen=True)
class OutboxLimits:
    """How much waits at most; the oldest update makes room, for newer ones start from newer rules."""

    updates: int = 4
    bytes: int = 8 << 20


class Outbox:
    """The updates of a device; safe to use from several threads."""

    def __init__(self, db: Database, limits: OutboxLimits | None = None) -> None:
        """The outbox in a database that has the tables of `SCHEMA`."""
        self._db, self._limits = db, limits or OutboxLimits()

    def mark(self) -> int:
        """Where the list of forgotten sessions ends now; to be asked before text is read to train on."""
        with self._db.read() as db:
            return int(db.execute("select coalesce(max(id), 0) from forgotten").fetchone()[0])

    def put(
        self,
        upload: Upload,
        schema: str,
        residual: Mapping[str, NDArray[np.float32]],
        sessions: Iterable[str],
        mark: int = 0,
    ) -> bool:
        """Keep an update, what its encoding left out, and the tags of the sessions it was trained on.

        All of it or nothing: a residual without its update, or the other way round, would count twice or never.
        Nothing and false if one of the sessions was forgotten since `mark`.
        """
        tags = [(tag,) for tag in sessions]
        with self._db.write() as db:
            gone = {row[0] for row in db.execute("select session from forgotten where id > ?", (mark,))}
            if any(tag in gone for (tag,) in tags):
                return False
            db.execute(
                "insert into upload (id, base_version, num_tokens, body, bytes, sha256, created) "
                "values (?, ?, ?, ?, ?, ?, ?)",
                (
                    upload.id, upload.base_version, upload.num_tokens, upload.body, len(upload.body),
                    upload.sha256, upload.created,
                ),
            )  # fmt: skip
            db.executemany("insert into upload_session values (?, ?)", [(upload.id, tag) for (tag,) in tags])
            db.execute("insert or replace into residual values (0, ?, ?)", (schema, pack(residual, {})))
            db.executemany("insert or ignore into residual_session values (?)", tags)
            self._make_room(db)
            crash_point("outbox_before_commit")
        crash_point("outbox_after_commit")
        return True

    def residual(self, schema: str) -> dict[str, NDArray[np.float32]]:
        """What earlier encodings left out, for rules of this schema; empty if nothing is known."""
        with self._db.read() as db:
            row = db.execute("select body from residual where schema = ?", (schema,)).fetchone()
        return unpack(row[0])[0] if row else {}

    def next(self) -> Upload | None:
        """The update to be sent now: the oldest that waits."""
        query = f"select id, base_version, num_tokens, body, created, attempts from upload where {WAITING}"
        with self._db.read() as db:
            row = db.execute(f"{query} order by created, id limit 1").fetchone()
        return Upload(*row) if row else None

    def made_for(self, base_version: int) -> bool:
        """Whether an update of the rules of this version was made already: a device has one vote a version."""
        with self._db.read() as db:
            return db.execute("select 1 from upload where base_version = ?", (base_version,)).fetchone() is not None

    def mark_sent(self, update_id: str) -> None:
        """Note that an update is about to leave, so that from here on the endpoint may have it."""
        with self._db.write() as db:
            db.execute(
                f"update upload set state = 'sent', attempts = attempts + 1 where id = ? and {WAITING}", (update_id,)
            )
        crash_point("outbox_marked_sent")

    def settle(self, update_id: str, state: Literal["accepted", "refused"], code: str | None = None) -> None:
        """Note what became of an update, and drop its body and the sessions it was made of."""
        crash_point("outbox_before_settle")
        with self._db.write() as db:
            db.execute("update upload set state = ?, code = ?, body = null where id = ?", (state, code, update_id))
            db.execute("delete from upload_session where id = ?", (update_id,))
            db.execute(
                f"delete from upload where not {WAITING} and id not in "
                f"(select id from upload where not {WAITING} order by created desc, id desc limit ?)",
                (KEPT_SETTLED,),
            )

    def forget(self, session: str) -> int:
        """Delete the updates that wait and were trained on a session, and what it left in the residual; say how many.

        What the endpoint has counted cannot be called back.
        """
        with self._db.write() as db:
            db.execute("delete from forgotten where id <= (select max(id) from forgotten) - ?", (KEPT_FORGOTTEN,))
            db.execute("insert into forgotten (session) values (?)", (session,))
            found = db.execute(
                "delete from upload where id in (select id from upload_session where session = ?)", (session,)
            ).rowcount
            if db.execute("delete from residual_session where session = ?", (session,)).rowcount:
                db.execute("delete from residual")
                db.execute("delete from residual_session")
        if found:
            self._db.scrub()
        return found

    def counts(self) -> dict[str, int]:
        """Updates by state, bytes that wait, and updates dropped because too many waited."""
        with self._db.read() as db:
            states = dict(db.execute("select state, count(*) from upload group by state").fetchall())
            (waiting,) = db.execute(f"select coalesce(sum(bytes), 0) from upload where {WAITING}").fetchone()
            (dropped,) = db.execute("select count from dropped").fetchone()
        names: tuple[State, ...] = ("pending", "sent", "accepted", "refused")
        return {**{name: states.get(name, 0) for name in names}, "waiting_bytes": waiting, "dropped": dropped}

    def fates(self, limit: int = 10) -> list[dict[str, object]]:
        """The last updates: id, base version, tokens, bytes, attempts, state and the endpoint's code, newest first."""
        names = ("id", "base_version", "num_tokens", "bytes", "attempts", "state", "code")
        query = f"select {', '.join(names)} from upload order by created desc, id desc limit ?"
        with self._db.read() as db:
            return [dict(zip(names, row, strict=True)) for row in db.execute(query, (limit,))]

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Drop the oldest updates that wait until the rest is within the limits; the newest one stays."""
        rows = db.execute(f"select id, bytes from upload where {WAITING} order by created desc, id desc").fetchall()
        kept, total = 0, 0
        for update_id, size in rows:
            kept, total = kept + 1, total + size
            if kept > 1 and (kept > self._limits.updates or total > self._limits.bytes):
                db.execute("delete from upload where id = ?", (update_id,))
                db.execute("update dropped set count = count + 1")
