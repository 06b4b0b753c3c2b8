"""Where state files lie: a folder that survives this process, or its memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import StateError, StoreError

SECRET_BYTES = 32
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""Errors of a file system that cannot give a file a second name, or no further one."""


class StateFiles(Protocol):
    """Files by name, each written whole or not at all."""

    def name(self, owner: str, session_id: str, content: int) -> str:
        """The name of the file of a version of a session."""

    def write(self, name: str, data: bytes) -> None:
        """Store a file; it is there for good when this returns. Raises StoreError."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes, at most one more than `max_bytes`. Raises StateError if it is missing or a link."""

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`. Raises StateError if that is missing, StoreError."""

    def delete(self, name: str) -> None:
        """Remove a name, if it is there. Raises StoreError."""

    def names(self) -> list[str]:
        """The names of all files."""

    def close(self) -> None:
        """Let another process have them."""


class MemoryFiles:
    """Files of this process alone."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def name(self, owner: str, session_id: str, content: int) -> str:
        """The name of the file of a version of a session."""
        return json.dumps([owner, session_id, content])

    def write(self, name: str, data: bytes) -> None:
        """Store a file."""
        self._files[name] = data

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes. Raises StateError."""
        if name not in self._files:
            raise StateError("The session's memory is missing. Roll back to another version, or delete it.")
        return self._files[name]

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`. Raises StateError."""
        self._files[other] = self.read(name, 0)

    def delete(self, name: str) -> None:
        """Remove a name, if it is there."""
        self._files.pop(name, None)

    def names(self) -> list[str]:
        """The names of all files."""
        return list(self._files)

    def close(self) -> None:
        """Nothing to do."""


class DiskFiles:
    """Files in `folder`/states, for one process at a time, readable by their owner alone.

    A file's name is an HMAC under the folder's own secret: no user chooses it, and it tells nobody
    whose session it holds.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder, making it if need be. Raises StoreError."""
        with _storing(folder):
            make_private(folder)
            self._states = folder / "states"
            self._states.mkdir(mode=0o700, exist_ok=True)
            with _locked(folder) as locked:
                self._secret = self._find_secret(folder)
                for stray in self._states.glob("*.tmp"):  # a process was killed while it wrote them
                    stray.unlink()
                self._held = locked.pop_all()

    def name(self, owner: str, session_id: str, content: int) -> str:
        """The name of the file of a version of a session."""
        told = json.dumps([owner, session_id]).encode()
        return f"{hmac.new(self._secret, told, hashlib.sha256).hexdigest()}.{content}.safetensors"

    def write(self, name: str, data: bytes) -> None:
        """Store a file: written aside, flushed, renamed, and its folder flushed. Raises StoreError."""
        with _storing(self._states):
            self._write(self._states, name, data)

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes, at most one more than `max_bytes`. Raises StateError if it is missing or a link."""
        try:
            with open(os.open(self._states / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise StateError(
                f"The session's memory cannot be read ({error.strerror}). Roll back to another version, or delete it."
            ) from error
        return data

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`. Raises StateError if that is missing, StoreError."""
        self.delete(other)
        try:
            os.link(self._states / name, self._states / other, follow_symlinks=False)
        except FileNotFoundError as error:
            raise StateError("The memory of one of the session's versions is missing; roll back first.") from error
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise _cannot_keep(self._states, error) from error
            self.write(other, (self._states / name).read_bytes())
        with _storing(self._states):
            _flush(self._states)

    def delete(self, name: str) -> None:
        """Remove a name, if it is there. Raises StoreError."""
        with _storing(self._states), contextlib.suppress(FileNotFoundError):
            (self._states / name).unlink()

    def names(self) -> list[str]:
        """The names of all files."""
        return [entry.name for entry in os.scandir(self._states)]

    def close(self) -> None:
        """Let another process have the folder."""
        self._held.close()

    def _find_secret(self, folder: Path) -> bytes:
        path = folder / "secret"
        if not path.exists() and not self.names():
            self._write(folder, path.name, secrets.token_bytes(SECRET_BYTES))
        if not path.exists() or len(secret := path.read_bytes()) != SECRET_BYTES:
            # Under another secret every file would be a stray, and be deleted.
            raise StoreError(f"{path} is missing or damaged, without which the sessions cannot be found. Restore it.")
        return secret

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        temporary = folder / f"{name}.tmp"
        try:
            self._write_aside(temporary, data)
            os.replace(temporary, folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        crash_point("file_after_rename")
        _flush(folder)
        crash_point("file_after_flush")

    def _write_aside(self, temporary: Path, data: bytes) -> None:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data[: len(data) // 2])
            crash_point("file_half_written")
            file.write(data[len(data) // 2 :])
            file.flush()
            crash_point("file_before_flush")
            os.fsync(file.fileno())
        crash_point("file_before_rename")


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)


def _locked(folder: Path) -> contextlib.ExitStack:
    """Keep other processes out of a folder until what is returned is closed. Raises StoreError, OSError."""
    with contextlib.ExitStack() as locked:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        locked.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"Another process keeps its sessions in {folder}. Stop it, or choose another folder with --state-dir."
            ) from None
        return locked.pop_all()


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_keep(folder, error) from error


def _cannot_keep(folder: Path, error: OSError) -> StoreError:
    return StoreError(f"Sessions cannot be kept in {folder} ({error.strerror}). Make room or mend its permissions.")
