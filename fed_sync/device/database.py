"""One SQLite file of a device: opened for its owner alone, and set aside if it is damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fednl_runtime.errors import StoreError

log = logging.getLogger("fednl_runtime.sync")


class Database:
    """A connection that several threads may use, one at a time."""

    def __init__(self, path: Path, schema: str, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> None:
        """Open or create the file with the tables of `schema`. Raises StoreError.

        A damaged file is set aside under another name: what it held is lost, and the device goes on.
        """
        self._lock = threading.Lock()
        with storing(path):
            try:
                self._db = _opened(path, schema, synchronous)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # locked, full or not allowed: not damaged
                    raise
                log.error("%s is damaged (%s) and was set aside", path.name, error)
                _set_aside(path)
                self._db = _opened(path, schema, synchronous)
        self._path = path

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The connection, to read from. Raises StoreError."""
        with self._lock, storing(self._path):
            yield self._db

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """The connection in a transaction that holds whole or not at all. Raises StoreError."""
        with self._lock, storing(self._path):
            self._db.execute("begin immediate")
            try:
                yield self._db
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def scrub(self) -> None:
        """Leave nothing in the file of what was deleted. Raises StoreError."""
        with self.read() as db:
            db.execute("pragma wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file; nothing may be asked of it afterwards."""
        with self._lock:
            self._db.close()


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and of the disk into a StoreError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            f"{path} cannot be used ({error}). Make room, or mend the permissions of its folder."
        ) from error


def _opened(path: Path, schema: str, synchronous: str) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("journal_mode = WAL", f"synchronous = {synchronous}", "foreign_keys = ON", "secure_delete = ON"):
            db.execute(f"pragma {pragma}")
        db.execute("pragma busy_timeout = 5000")
        if db.execute("pragma quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("its pages contradict each other")
        db.executescript(f"begin; {schema} commit;")
    except BaseException:
        db.close()
        raise
    return db


def _set_aside(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        old = path.with_name(path.name + suffix)
        if old.exists():
            old.rename(path.with_name(f"{path.name}.damaged-{time.time_ns()}{suffix}"))
