"""The sessions of an engine: committed versions kept for good, the ones in use resident."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import (
    SessionExistsError,
    SessionLimitError,
    SessionNotFoundError,
    SnapshotNotFoundError,
    StoreError,
    VersionConflictError,
)
from fednl_runtime.history import Mark
from fednl_runtime.records import Receipt, Record, Settings, Update
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state_file import StateFormat
from fednl_runtime.vault import StoreLimits, Vault

STRIPES = 64


class Journal(Protocol):
    """Who keeps the text of committed turns besides their sessions, and must forget it with them."""

    def record(self, key: SessionKey, tokens: tuple[int, ...]) -> None:
        """Keep what a committed turn read and chose; it is committed whether this can be kept or not."""

    def forget(self, key: SessionKey) -> None:
        """Delete all that is kept of a session. Raises StoreError."""


class SessionStore:
    """Committed sessions by owner and name; safe to use from several threads.

    Every change of a session makes a version that follows its head, stored for good before anybody
    sees it. One that counts on an older head is refused, so of two writers one fails.
    """

    def __init__(
        self, form: StateFormat, limits: StoreLimits, folder: Path | None = None, journal: Journal | None = None
    ) -> None:
        """Keep sessions in `folder`, or in memory without one. Raises StoreError.

        `journal` is told the text of committed turns, unless their session's `sync` is off.
        """
        self._vault, self._journal = Vault(form, limits, folder), journal
        self._writers = sorted((threading.RLock() for _ in range(STRIPES)), key=id)

    def close(self) -> None:
        """Let another process have the folder, once what is being written has been."""
        with contextlib.ExitStack() as writers:
            for writer in self._writers:
                writers.enter_context(writer)
            self._vault.close()

    def find(self, key: SessionKey) -> Record:
        """What is known of a session; an empty record if it does not exist or has outlived its time."""
        record = self._vault.records.get(key)
        if record is not None and record.expired(time.time()):
            self._expire(key)
            record = self._vault.records.get(key)
        return record or Record(key, settings=Settings(ttl_s=self._vault.limits.ttl_s))

    def get(self, key: SessionKey) -> Record:
        """What is known of a session. Raises SessionNotFoundError."""
        record = self._vault.records.get(key)
        if record is None or record.expired(time.time()):
            raise SessionNotFoundError(f"There is no session {key.id!r}.")
        return record

    def touch(self, key: SessionKey) -> None:
        """Note that a session with a time to live is in use, at most every hundredth of that time.

        A turn that keeps nothing makes no version that would tell. What cannot be written down is let be.
        """
        with self._writer(key), contextlib.suppress(StoreError):
            record, now = self._vault.records.get(key), time.time()
            if record is None or record.settings.ttl_s is None or record.expired(now):
                return
            if now > record.used + record.settings.ttl_s / 100:
                self._vault.records.commit(dataclasses.replace(record, used=now))

    def load(self, record: Record, mark: Mark) -> Session:
        """The memory of a version, as the base of the version that follows the head. Raises StateError."""
        return self._vault.read(record, mark)

    def is_resident(self, record: Record) -> bool:
        """Whether the head's memory is at hand and need not be read from disk."""
        return self._vault.is_resident(record)

    def receipt(self, key: SessionKey, retry_key: str | None) -> Receipt | None:
        """The receipt of the turn that was committed under `retry_key`, or of the last one if that is None."""
        return self._vault.records.receipt(key, retry_key)

    def check_room(self, key: SessionKey) -> None:
        """Raise SessionLimitError if the version of a further turn does not fit."""
        record = self.find(key)
        version = record.head.version + 1
        self._vault.check_room(record, (*record.marks, Mark(version, content=version, anchor=record.head.version)))

    def commit(
        self,
        after: Session,
        mark: Mark,
        update: Update,
        receipt: Receipt | None = None,
        text: tuple[int, ...] = (),
    ) -> None:
        """Store `after`, the version that follows the head its turn began with; `text` is what the turn read and chose.

        Raises:
            VersionConflictError: the head has changed since.
            SessionNotFoundError: the session was deleted since; it stays deleted.
            SessionLimitError, StoreError: it cannot be stored.
        """
        key = after.key
        assert key is not None, "an ephemeral turn has nothing to commit"
        assert mark.version == mark.content == after.version, "a turn writes its own memory"
        began = time.perf_counter()
        with self._writer(key):
            record = self._vault.write(_used(self._expect(after), mark), after, mark, update, receipt)
            self._vault.resident.put(key, mark.content, dataclasses.replace(after, created=record.created))
            if self._journal is not None and record.settings.sync:
                self._journal.record(key, text)
        self._vault.count("persists")
        self._vault.count("persist_seconds", time.perf_counter() - began)
        crash_point("store_after_commit")

    def create(self, key: SessionKey, settings: Settings) -> Record:
        """A session that has read nothing. Raises SessionExistsError, SessionLimitError."""
        with self._writer(key):
            self._refuse_existing(key)
            self.check_room(key)
            now = time.time()
            record = Record(key, settings=settings, created=now, used=now)
            self._vault.records.commit(record)
        return record

    def page(self, owner: str, after: str = "", limit: int = 100) -> list[Record]:
        """An owner's sessions by name, at most `limit` of those that follow `after`."""
        found = [self._vault.records.get(key) for key in self._vault.records.keys(owner, after, limit)]
        return [record for record in found if record is not None and not record.expired(time.time())]

    def configure(self, key: SessionKey, **changes: Any) -> Record:
        """Change some of a session's Settings, by name. Raises SessionNotFoundError."""
        with self._writer(key):
            record = self.get(key)
            record = dataclasses.replace(record, settings=dataclasses.replace(record.settings, **changes))
            self._vault.records.commit(record)
            if not record.settings.sync:
                self._forget(key)
        return record

    def rollback(self, key: SessionKey, to: int | str | None = None, turns: int = 1) -> Record:
        """Make a version with the memory of an older one: by number, by name, or before the last `turns` turns.

        Raises:
            SessionNotFoundError: there is no such session.
            SnapshotNotFoundError: that version is not kept any more.
        """
        with self._writer(key):
            record = self.get(key)
            mark = self._before(record, turns) if to is None else self._mark(record, to)
            self._vault.count("rollbacks")
            return self._revise(record, mark, mark.parent, "rollback")

    def reset(self, key: SessionKey) -> Record:
        """Make a version that has read nothing. Raises SessionNotFoundError."""
        with self._writer(key):
            record = self.get(key)
            self._forget(key)
            return self._revise(record, Mark(), record.head.version, "reset")

    def snapshot(self, key: SessionKey, name: str) -> Mark:
        """Give the head a name, under which it is kept.

        Raises SessionNotFoundError, SessionExistsError, SessionLimitError.
        """
        with self._writer(key):
            record = self.get(key)
            named = [mark.name for mark in record.marks if mark.name is not None]
            if name in named:
                raise SessionExistsError(f"There is a snapshot {name!r} already; delete it first.")
            if record.head.name is not None:
                raise SessionExistsError(
                    f"The head is the snapshot {record.head.name!r} already; use that, or delete it first."
                )
            if len(named) >= self._vault.limits.snapshots:
                raise SessionLimitError(f"The session has {len(named)} snapshots, all it may have; delete one.")
            head = dataclasses.replace(record.head, name=name, created=record.head.created or time.time())
            self._vault.records.commit(dataclasses.replace(record, marks=(*record.marks[:-1], head)))
        return head

    def drop_snapshot(self, key: SessionKey, name: str) -> None:
        """Take a name from its version. Raises SessionNotFoundError, SnapshotNotFoundError."""
        with self._writer(key):
            record = self.get(key)
            named = self._mark(record, name)
            marks = [dataclasses.replace(mark, name=None) if mark is named else mark for mark in record.marks]
            self._vault.revise(record, marks)

    def fork(self, key: SessionKey, new_id: str, to: int | str | None = None) -> Record:
        """A second session that goes on from a version of this one, by default its head, with all before it.

        Raises SessionNotFoundError, SnapshotNotFoundError, SessionExistsError, SessionLimitError.
        """
        other = SessionKey(key.owner, new_id)
        first, second = sorted((self._writer(key), self._writer(other)), key=id)
        with first, second:
            record = self.get(key)
            head = record.head if to is None else self._mark(record, to)
            self._refuse_existing(other)
            marks, now = tuple(mark for mark in record.marks if mark.version <= head.version), time.time()
            copy = Record(other, marks, record.settings, created=now, used=now)
            self._vault.link(key, copy, Update(copy.head.version, "fork", now))
        self._vault.count("forks")
        return copy

    def export(self, key: SessionKey) -> bytes:
        """The head as a state file. Raises SessionNotFoundError, StateError."""
        record = self.get(key)
        return self._vault.form.encode(self.load(record, record.head), record.head)

    def import_(self, key: SessionKey, data: bytes) -> Record:
        """A session out of a state file, which is checked whole first.

        Raises StateError, SessionExistsError, SessionLimitError.
        """
        session, mark = self._vault.form.decode(data, key)
        with self._writer(key):
            self._refuse_existing(key)
            now = time.time()
            mark = dataclasses.replace(mark, version=1, content=1, parent=0, anchor=1, created=now, name=None)
            session = dataclasses.replace(session, version=1)
            record = Record(key, settings=Settings(ttl_s=self._vault.limits.ttl_s), created=now, used=now)
            return self._vault.write(record, session, mark, Update(1, "import", now, tokens=mark.tokens_seen))

    def delete(self, key: SessionKey) -> None:
        """Forget a session and all that was kept of it; a turn that runs on it will not bring it back.

        No byte of it is left in the folder, at once or, if many are deleted, with the next sweep.
        Raises SessionNotFoundError, StoreError.
        """
        with self._writer(key):
            record = self._vault.records.get(key)
            self._forget(key)
            if record is None or not self._vault.remove(record):
                raise SessionNotFoundError(f"There is no session {key.id!r}.")
        with contextlib.suppress(StoreError):  # it is deleted; the next sweep tries again
            self._vault.records.scrub()

    def updates(self, key: SessionKey, after: int = -1, limit: int = 100) -> list[Update]:
        """The provenance log, oldest first, of versions above `after`. Raises SessionNotFoundError."""
        return self._vault.records.updates(self.get(key).key, after, limit)

    def sweep(self) -> int:
        """Delete the sessions that have outlived their time and say how many; scrub after those deleted before."""
        deleted = sum(map(self._expire, self._vault.records.expired(time.time())))
        self._vault.records.scrub()
        return deleted

    def stats(self) -> dict[str, float]:
        """Numbers for whoever watches: sessions, versions, bytes resident, and counts since the start."""
        return self._vault.stats()

    def _forget(self, key: SessionKey) -> None:
        """Have the journal forget a session: before it is deleted, so that a crash leaves no text behind."""
        if self._journal is not None:
            self._journal.forget(key)

    def _writer(self, key: SessionKey) -> threading.RLock:
        return self._writers[hash(key) % STRIPES]

    def _expect(self, after: Session) -> Record:
        """The record that `after` follows. Raises VersionConflictError, SessionNotFoundError."""
        assert after.key is not None
        record = self.find(after.key)
        if after.created not in (0, record.created):
            raise SessionNotFoundError(f"Session {after.id!r} was deleted while the turn ran; the turn is gone too.")
        if record.head.version != after.version - 1:
            self._vault.count("conflicts")
            raise VersionConflictError(
                f"Session {after.id!r} went to version {record.head.version} while the turn ran; the turn is gone."
            )
        return record

    def _expire(self, key: SessionKey) -> bool:
        """Delete a session if it has outlived its time; say whether it had."""
        record = self._vault.records.get(key)
        if record is None or not record.expired(time.time()):
            return False
        with self._writer(key):
            record = self._vault.records.get(key)  # it may have been used, or deleted, just now
            if record is None or not record.expired(time.time()):
                return False
            self.delete(key)
        return True

    def _refuse_existing(self, key: SessionKey) -> None:
        if not self._expire(key) and self._vault.records.get(key) is not None:
            raise SessionExistsError(f"There is a session {key.id!r} already; delete it, or choose another name.")

    def _mark(self, record: Record, to: int | str) -> Mark:
        """The version of that number or name; version 0 is always there. Raises SnapshotNotFoundError."""
        if to == 0:
            return Mark()
        for mark in record.marks:
            if to in (mark.version, mark.name):
                return mark
        kept = ", ".join(str(mark.version) for mark in record.marks)
        raise SnapshotNotFoundError(f"Session {record.key.id!r} keeps no version {to!r}; it keeps {kept or 'none'}.")

    def _before(self, record: Record, turns: int) -> Mark:
        mark = record.head
        for _ in range(turns):
            if mark.content == mark.parent == 0:
                raise SnapshotNotFoundError(f"Session {record.key.id!r} has fewer than {turns} turns.")
            mark = self._mark(record, mark.parent)
        return mark

    def _revise(self, record: Record, mark: Mark, parent: int, kind: str) -> Record:
        """Make a version with the memory of `mark`."""
        now, version = time.time(), record.head.version + 1
        anchor = mark.anchor if mark.version else version
        revised = dataclasses.replace(mark, version=version, parent=parent, anchor=anchor, created=now, name=None)
        return self._vault.revise(_used(record, revised), (*record.marks, revised), Update(version, kind, now))


def _used(record: Record, mark: Mark) -> Record:
    """The record as it is when `mark` becomes its head."""
    return dataclasses.replace(record, created=record.created or mark.created, used=mark.created)
