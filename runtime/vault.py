"""What is kept of sessions: a state file for each memory, a record for each session, those in use resident."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import SessionLimitError, SessionNotFoundError, StateError, StoreError
from fednl_runtime.files import DiskFiles, MemoryFiles, StateFiles
from fednl_runtime.history import Mark
from fednl_runtime.records import Receipt, Record, Records, Update
from fednl_runtime.resident import Resident
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.state_file import StateFormat

DATABASE = "sessions.db"
"""Beside the state files."""


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


def contents(marks: Iterable[Mark]) -> set[int]:
    """The versions whose turns wrote the memories of `marks`; a fresh memory was written by none."""
    return {mark.content for mark in marks} - {0}


class Vault:
    """Files and records that fit each other whenever the process is killed; callers let one writer a session in.

    A version's file is there before its record is, and goes after it.
    """

    def __init__(self, form: StateFormat, limits: StoreLimits, folder: Path | None) -> None:
        """Keep sessions in `folder`, or in memory without one. Raises StoreError."""
        self.form, self.limits = form, limits
        self._capacity = limits.resident_bytes if folder is None else limits.stored_bytes
        self.files: StateFiles = MemoryFiles() if folder is None else DiskFiles(folder)
        # Without a folder the files lie in memory themselves, and take all of its room.
        self.resident = Resident(0 if folder is None else limits.resident_bytes)
        self._lock = threading.Lock()
        self._counts: collections.defaultdict[str, float] = collections.defaultdict(float)
        with contextlib.ExitStack() as opened:
            opened.callback(self.files.close)
            database = None if folder is None else folder / DATABASE
            self._refuse_orphans(database)
            self.records = Records(database)
            opened.callback(self.records.close)
            self._drop_strays()
            opened.pop_all()

    def close(self) -> None:
        """Let another process have the folder."""
        self.records.close()
        self.files.close()

    def read(self, record: Record, mark: Mark) -> Session:
        """The memory of a version, as the base of the version that follows the head. Raises StateError."""
        if mark.content == 0:
            state = MemoryState.zeros(self.form.config)
            return Session(record.key, state, record.head.version, created=record.created)
        session = self.resident.get(record.key, mark.content)
        if session is None or session.created != record.created:
            session = self._restore(record, mark)
            if mark.content == record.head.content:
                self.resident.put(record.key, mark.content, session)
                if self._is_gone(record):  # deleted after it was read, and must not stay
                    self.resident.drop(record.key)
        return dataclasses.replace(session, version=record.head.version)

    def is_resident(self, record: Record) -> bool:
        """Whether the head's memory is at hand and need not be read from disk."""
        return record.head.content == 0 or self.resident.holds(record.key, record.head.content)

    def check_room(self, record: Record, marks: tuple[Mark, ...]) -> None:
        """Raise SessionLimitError if `record` needs more room with `marks` and there is none."""
        sessions, stored = self.records.counts()
        more = len(contents(self.kept(marks))) - len(contents(record.marks))
        if more > 0 and (stored + more) * self.form.max_bytes > self._capacity:
            raise SessionLimitError(f"{sessions} sessions fill the room set aside; delete one or raise the limit.")

    def write(
        self, record: Record, session: Session, mark: Mark, update: Update, receipt: Receipt | None = None
    ) -> Record:
        """Keep a new memory as the next version. Raises SessionLimitError, StoreError, and then nothing is kept."""
        marks = (*record.marks, mark)
        self.check_room(record, marks)
        crash_point("store_before_file")
        with self._unless_failed(record.key, {mark.content}):
            self.files.write(self.name(record.key, mark.content), self.form.encode(session, mark))
            return self.revise(record, marks, update, receipt)

    def link(self, source: SessionKey, record: Record, update: Update) -> None:
        """Keep a session whose memories are those of another. Raises SessionLimitError, StoreError."""
        self.check_room(Record(record.key), record.marks)
        linked = contents(record.marks)
        with self._unless_failed(record.key, linked):
            for content in linked:
                self.files.link(self.name(source, content), self.name(record.key, content))
                crash_point("fork_after_link")
            self.records.commit(record, update)

    def revise(
        self, record: Record, marks: Iterable[Mark], update: Update | None = None, receipt: Receipt | None = None
    ) -> Record:
        """Store a record with those of `marks` that are still to be kept; delete what no version refers to."""
        kept = self.kept(tuple(marks))
        revised = dataclasses.replace(record, marks=kept)
        self.records.commit(revised, update, receipt)
        with contextlib.suppress(StoreError):  # it is committed; what stays is a stray, and goes at the next start
            self._delete_files(record.key, contents(record.marks) - contents(kept))
        return revised

    def kept(self, marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
        """The last versions, the named ones, and the one that the conversation began from if more than one is kept."""
        if not marks:
            return ()
        first = len(marks) - self.limits.versions
        anchor = marks[-1].anchor if self.limits.versions > 1 else None
        return tuple(m for i, m in enumerate(marks) if i >= first or m.name is not None or m.version == anchor)

    def remove(self, record: Record) -> bool:
        """Forget a session; say whether there was one. Raises StoreError."""
        if not self.records.delete(record.key):
            return False
        self.resident.drop(record.key)
        self._delete_files(record.key, contents(record.marks))
        crash_point("delete_after_files")
        return True

    def name(self, key: SessionKey, content: int) -> str:
        """The name of a version's file."""
        return self.files.name(*key, content)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of the numbers of `stats`."""
        with self._lock:
            self._counts[name] += amount

    def stats(self) -> dict[str, float]:
        """Sessions, versions, what is resident, and counts since the start."""
        sessions, versions = self.records.counts()
        with self._lock:
            counts = dict(self._counts)
        return {"sessions": sessions, "versions": versions, **self.resident.stats(), **counts}

    def _restore(self, record: Record, mark: Mark) -> Session:
        key = record.key
        try:
            session, stored = self.form.decode(self.files.read(self.name(key, mark.content), self.form.max_bytes), key)
            if (stored.content, stored.tokens_seen) != (mark.content, mark.tokens_seen):
                raise StateError("The state file is not that of this version. Roll back to another one.")
        except StateError:
            if self._is_gone(record):
                raise SessionNotFoundError(f"Session {key.id!r} was deleted just now.") from None
            self.count("failed_restores")
            raise
        self.count("restores")
        return dataclasses.replace(session, created=record.created)

    def _is_gone(self, record: Record) -> bool:
        """Whether that session was deleted, even if another has its name now."""
        now = self.records.get(record.key)
        return now is None or now.created != record.created

    def _delete_files(self, key: SessionKey, stored: Iterable[int]) -> None:
        for content in stored:
            crash_point("store_before_unlink")
            self.files.delete(self.name(key, content))

    @contextlib.contextmanager
    def _unless_failed(self, key: SessionKey, stored: Iterable[int]) -> Iterator[None]:
        """Files of new versions are written here; they go again if it does not come to a version."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StoreError):
                self._delete_files(key, stored)
            raise

    def _refuse_orphans(self, database: Path | None) -> None:
        """Raise StoreError if the database is lost: under an empty one every memory would be a stray, to be deleted."""
        if database is None or (database.exists() and database.stat().st_size):
            return
        if self.files.names():
            raise StoreError(
                f"{database} is missing or empty, and without it the sessions cannot be found. Restore it."
            )

    def _drop_strays(self) -> None:
        """Delete files of versions that were never committed: the process was killed in between."""
        known = {self.files.name(*content) for content in self.records.contents()}
        for name in set(self.files.names()) - known:
            self.files.delete(name)
