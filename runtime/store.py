"""The sessions of an engine: committed versions kept for good, the ones in use resident."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import (
    SessionExistsError,
    SessionLimitError,
    SessionNotFoundError,
    SnapshotNotFoundError,
    StateError,
    StoreError,
    VersionConflictError,
)
from fednl_runtime.files import DiskFiles, MemoryFiles, StateFiles
from fednl_runtime.history import Mark
from fednl_runtime.records import Receipt, Record, Records, Settings, Update
from fednl_runtime.resident import Resident
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.state_file import StateFormat

STRIPES = 64


@dataclasses.dataclass(frozen=True)
class StoreLimits:
    """How much is kept. Sizes in bytes; `ttl_s` in seconds after a session's last use, None for ever."""

    resident_bytes: int = 1 << 30
    """Memory for sessions that are ready to go on; the least recently used are read from disk again."""
    stored_bytes: int = 16 << 30
    """Disk for all versions of all sessions; without a folder they lie in `resident_bytes` of memory."""
    versions: int = 8
    """Versions of a session to go back to; named snapshots come on top."""
    snapshots: int = 16
    """Named snapshots of a session."""
    ttl_s: float | None = None


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
        self._form, self._limits, self._journal = form, limits, journal
        self._capacity = limits.resident_bytes if folder is None else limits.stored_bytes
        self._files: StateFiles = MemoryFiles() if folder is None else DiskFiles(folder)
        # Without a folder the files lie in memory themselves, and take all of its room.
        self._resident = Resident(0 if folder is None else limits.resident_bytes)
        self._lock = threading.Lock()
        self._writers = sorted((threading.RLock() for _ in range(STRIPES)), key=id)
        self._counts: collections.defaultdict[str, float] = collections.defaultdict(float)
        with contextlib.ExitStack() as opened:
            opened.callback(self._files.close)
            self._records = Records(None if folder is None else folder / "sessions.db")
            opened.callback(self._records.close)
            self._drop_strays()
            opened.pop_all()

    def close(self) -> None:
        """Let another process have the folder, once what is being written has been."""
        with contextlib.ExitStack() as writers:
            for writer in self._writers:
                writers.enter_context(writer)
            self._records.close()
            self._files.close()

    def find(self, key: SessionKey) -> Record:
        """What is known of a session; an empty record if it does not exist or has outlived its time."""
        record = self._records.get(key)
        if record is not None and record.expired(time.time()):
            self._expire(key)
            record = self._records.get(key)
        return record or Record(key, settings=Settings(ttl_s=self._limits.ttl_s))

    def get(self, key: SessionKey) -> Record:
        """What is known of a session. Raises SessionNotFoundError."""
        record = self._records.get(key)
        if record is None or record.expired(time.time()):
            raise SessionNotFoundError(f"There is no session {key.id!r}.")
        return record

    def load(self, record: Record, mark: Mark) -> Session:
        """The memory of a version, as the base of the version that follows the head. Raises StateError."""
        if mark.content == 0:
            state = MemoryState.zeros(self._form.config)
            return Session(record.key, state, record.head.version, created=record.created)
        session = self._resident.get(record.key, mark.content)
        if session is None or session.created != record.created:
            session = self._read(record, mark)
            if mark.content == record.head.content:
                self._resident.put(record.key, mark.content, session)
                if self._is_gone(record):  # deleted after it was read, and must not stay
                    self._resident.drop(record.key)
        return dataclasses.replace(session, version=record.head.version)

    def is_resident(self, record: Record) -> bool:
        """Whether the head's memory is at hand and need not be read from disk."""
        return record.head.content == 0 or self._resident.holds(record.key, record.head.content)

    def receipt(self, key: SessionKey, retry_key: str | None) -> Receipt | None:
        """The receipt of the turn that was committed under `retry_key`, or of the last one if that is None."""
        return self._records.receipt(key, retry_key)

    def check_room(self, key: SessionKey) -> None:
        """Raise SessionLimitError if the version of a further turn does not fit."""
        record = self.find(key)
        version = record.head.version + 1
        self._check_room(record, (*record.marks, Mark(version, content=version, anchor=record.head.version)))

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
            record = self._expect(after)
            self._check_room(record, (*record.marks, mark))
            crash_point("store_before_file")
            with self._unless_failed(key, {mark.content}):
                self._files.write(self._name(key, mark.content), self._form.encode(after, mark))
                record = self._replace(record, mark, update, receipt)
            self._resident.put(key, mark.content, dataclasses.replace(after, created=record.created))
            if self._journal is not None and record.settings.sync:
                self._journal.record(key, text)
        self._count("persists")
        self._count("persist_seconds", time.perf_counter() - began)
        crash_point("store_after_commit")

    def create(self, key: SessionKey, settings: Settings) -> Record:
        """A session that has read nothing. Raises SessionExistsError, SessionLimitError."""
        with self._writer(key):
            self._refuse_existing(key)
            self.check_room(key)
            now = time.time()
            record = Record(key, settings=settings, created=now, used=now)
            self._records.commit(record)
        return record

    def page(self, owner: str, after: str = "", limit: int = 100) -> list[Record]:
        """An owner's sessions by name, at most `limit` of those that follow `after`."""
        found = [self._records.get(key) for key in self._records.keys(owner, after, limit)]
        return [record for record in found if record is not None and not record.expired(time.time())]

    def configure(self, key: SessionKey, settings: Settings) -> Record:
        """Change what is set of a session. Raises SessionNotFoundError."""
        with self._writer(key):
            record = dataclasses.replace(self.get(key), settings=settings)
            self._records.commit(record)
            if not settings.sync:
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
            self._count("rollbacks")
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
            if len(named) >= self._limits.snapshots:
                raise SessionLimitError(f"The session has {len(named)} snapshots, all it may have; delete one.")
            head = dataclasses.replace(record.head, name=name, created=record.head.created or time.time())
            self._records.commit(dataclasses.replace(record, marks=(*record.marks[:-1], head)))
        return head

    def drop_snapshot(self, key: SessionKey, name: str) -> None:
        """Take a name from its version. Raises SessionNotFoundError, SnapshotNotFoundError."""
        with self._writer(key):
            record = self.get(key)
            named = self._mark(record, name)
            marks = [dataclasses.replace(mark, name=None) if mark is named else mark for mark in record.marks]
            self._commit(record, marks)

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
            copy, contents = Record(other, marks, record.settings, created=now, used=now), _contents(marks)
            self._check_room(Record(other), marks)
            with self._unless_failed(other, contents):
                for content in contents:
                    self._files.link(self._name(key, content), self._name(other, content))
                    crash_point("fork_after_link")
                self._records.commit(copy, Update(copy.head.version, "fork", now))
        self._count("forks")
        return copy

    def export(self, key: SessionKey) -> bytes:
        """The head as a state file. Raises SessionNotFoundError, StateError."""
        record = self.get(key)
        return self._form.encode(self.load(record, record.head), record.head)

    def import_(self, key: SessionKey, data: bytes) -> Record:
        """A session out of a state file, which is checked whole first.

        Raises StateError, SessionExistsError, SessionLimitError.
        """
        session, mark = self._form.decode(data, key)
        with self._writer(key):
            self._refuse_existing(key)
            self.check_room(key)
            now = time.time()
            mark = dataclasses.replace(mark, version=1, content=1, parent=0, anchor=1, created=now, name=None)
            session = dataclasses.replace(session, version=1)
            record = Record(key, settings=Settings(ttl_s=self._limits.ttl_s), created=now, used=now)
            with self._unless_failed(key, {1}):
                self._files.write(self._name(key, 1), self._form.encode(session, mark))
                return self._replace(record, mark, Update(1, "import", now, tokens=mark.tokens_seen))

    def delete(self, key: SessionKey) -> None:
        """Forget a session and all that was kept of it; a turn that runs on it will not bring it back.

        No byte of it is left in the folder, at once or, if many are deleted, with the next sweep.
        Raises SessionNotFoundError, StoreError.
        """
        with self._writer(key):
            record = self._records.get(key)
            self._forget(key)
            if record is None or not self._records.delete(key):
                raise SessionNotFoundError(f"There is no session {key.id!r}.")
            self._resident.drop(key)
            self._delete_files(key, _contents(record.marks))
            crash_point("delete_after_files")
        with contextlib.suppress(StoreError):  # it is deleted; the next sweep tries again
            self._records.scrub()

    def updates(self, key: SessionKey, after: int = -1, limit: int = 100) -> list[Update]:
        """The provenance log, oldest first, of versions above `after`. Raises SessionNotFoundError."""
        return self._records.updates(self.get(key).key, after, limit)

    def sweep(self) -> int:
        """Delete the sessions that have outlived their time and say how many; scrub after those deleted before."""
        deleted = sum(map(self._expire, self._records.expired(time.time())))
        self._records.scrub()
        return deleted

    def stats(self) -> dict[str, float]:
        """Numbers for whoever watches: sessions, versions, bytes resident, and counts since the start."""
        sessions, contents = self._records.counts()
        with self._lock:
            counts = dict(self._counts)
        return {"sessions": sessions, "versions": contents, **self._resident.stats(), **counts}

    def _forget(self, key: SessionKey) -> None:
        """Have the journal forget a session: before it is deleted, so that a crash leaves no text behind."""
        if self._journal is not None:
            self._journal.forget(key)

    def _writer(self, key: SessionKey) -> threading.RLock:
        return self._writers[hash(key) % STRIPES]

    def _name(self, key: SessionKey, content: int) -> str:
        return self._files.name(*key, content)

    def _expect(self, after: Session) -> Record:
        """The record that `after` follows. Raises VersionConflictError, SessionNotFoundError."""
        assert after.key is not None
        record = self.find(after.key)
        if after.created not in (0, record.created):
            raise SessionNotFoundError(f"Session {after.id!r} was deleted while the turn ran; the turn is gone too.")
        if record.head.version != after.version - 1:
            self._count("conflicts")
            raise VersionConflictError(
                f"Session {after.id!r} went to version {record.head.version} while the turn ran; the turn is gone."
            )
        return record

    def _is_gone(self, record: Record) -> bool:
        """Whether that session was deleted, even if another has its name now."""
        now = self._records.get(record.key)
        return now is None or now.created != record.created

    def _expire(self, key: SessionKey) -> bool:
        """Delete a session if it has outlived its time; say whether it had."""
        record = self._records.get(key)
        if record is None or not record.expired(time.time()):
            return False
        with self._writer(key):
            record = self._records.get(key)  # it may have been used, or deleted, just now
            if record is None or not record.expired(time.time()):
                return False
            self.delete(key)
        return True

    def _check_room(self, record: Record, marks: tuple[Mark, ...]) -> None:
        """Raise SessionLimitError if `record` needs more room with `marks` and there is none."""
        sessions, contents = self._records.counts()
        more = len(_contents(self._kept(marks))) - len(_contents(record.marks))
        if more > 0 and (contents + more) * self._form.max_bytes > self._capacity:
            raise SessionLimitError(f"{sessions} sessions fill the room set aside; delete one or raise the limit.")

    def _refuse_existing(self, key: SessionKey) -> None:
        if not self._expire(key) and self._records.get(key) is not None:
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
        return self._replace(record, revised, Update(version, kind, now))

    def _replace(self, record: Record, mark: Mark, update: Update, receipt: Receipt | None = None) -> Record:
        record = dataclasses.replace(record, created=record.created or mark.created, used=mark.created)
        return self._commit(record, (*record.marks, mark), update, receipt)

    def _commit(
        self, record: Record, marks: Iterable[Mark], update: Update | None = None, receipt: Receipt | None = None
    ) -> Record:
        """Store a record with those of `marks` that are still to be kept; delete what no version refers to."""
        kept = self._kept(tuple(marks))
        revised = dataclasses.replace(record, marks=kept)
        self._records.commit(revised, update, receipt)
        with contextlib.suppress(StoreError):  # it is committed; what stays is a stray, and goes at the next start
            self._delete_files(record.key, _contents(record.marks) - _contents(kept))
        return revised

    def _kept(self, marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
        """The last versions, the named ones, and the one that the conversation began from if more than one is kept."""
        if not marks:
            return ()
        first = len(marks) - self._limits.versions
        anchor = marks[-1].anchor if self._limits.versions > 1 else None
        return tuple(m for i, m in enumerate(marks) if i >= first or m.name is not None or m.version == anchor)

    def _delete_files(self, key: SessionKey, contents: Iterable[int]) -> None:
        for content in contents:
            crash_point("store_before_unlink")
            self._files.delete(self._name(key, content))

    @contextlib.contextmanager
    def _unless_failed(self, key: SessionKey, contents: Iterable[int]) -> Iterator[None]:
        """Files of new versions are written here; they go again if it does not come to a version."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StoreError):
                self._delete_files(key, contents)
            raise

    def _read(self, record: Record, mark: Mark) -> Session:
        key = record.key
        try:
            data = self._files.read(self._name(key, mark.content), self._form.max_bytes)
            session, stored = self._form.decode(data, key)
            if (stored.content, stored.tokens_seen) != (mark.content, mark.tokens_seen):
                raise StateError("The state file is not that of this version. Roll back to another one.")
        except StateError:
            if self._is_gone(record):
                raise SessionNotFoundError(f"Session {key.id!r} was deleted just now.") from None
            self._count("failed_restores")
            raise
        self._count("restores")
        return dataclasses.replace(session, created=record.created)

    def _count(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def _drop_strays(self) -> None:
        """Delete files of versions that were never committed: the process was killed in between."""
        known = {self._files.name(*content) for content in self._records.contents()}
        for name in set(self._files.names()) - known:
            self._files.delete(name)


def _contents(marks: Iterable[Mark]) -> set[int]:
    """The versions whose turns wrote the memories of `marks`; a fresh memory was written by none."""
    return {mark.content for mark in marks} - {0}
