"""Where state files lie: a folder that survives this process, or its memory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fednl_runtime.crash import crash_point
from fednl_runtime.errors import StateError, StoreError


class StateFiles(Protocol):
    """Files by name, each written whole or not at all."""

    def name(self, owner: str, session_id: str, content: int) -> str:
        """The name of the file of a version of a session."""

    def write(self, name: str, data: bytes) -> None:
        """Store a file; it is there for good when this returns. Raises StoreError."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes. Raises StateError if it is missing, a link, or larger than `max_bytes`."""

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`. Raises StoreError."""

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
        return f"{owner}/{session_id}.{content}"

    def write(self, name: str, data: bytes) -> None:
        """Store a file."""
        self._files[name] = data

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes. Raises StateError."""
        if name not in self._files:
            raise StateError("The session's memory is missing. Roll back to another version, or delete it.")
        return self._files[name]

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`."""
        self._files[other] = self._files[name]

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
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._states = folder / "states"
            self._states.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise StoreError(f"Another process keeps its sessions in {folder}. Choose another folder.") from None
            self._secret = self._find_secret(folder)
            for stray in self._states.glob("*.tmp"):  # a process was killed while it wrote them
                stray.unlink()

    def name(self, owner: str, session_id: str, content: int) -> str:
        """The name of the file of a version of a session."""
        told = f"{owner}\0{session_id}".encode()
        return f"{hmac.new(self._secret, told, hashlib.sha256).hexdigest()}.{content}.safetensors"

    def write(self, name: str, data: bytes) -> None:
        """Store a file: written aside, flushed, renamed, and its folder flushed. Raises StoreError."""
        with _storing(self._states):
            self._write(self._states, name, data)

    def read(self, name: str, max_bytes: int) -> bytes:
        """A file's bytes. Raises StateError if it is missing, a link, or larger than `max_bytes`."""
        try:
            with open(os.open(self._states / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise StateError(
                f"The session's memory cannot be read ({error.strerror}). Roll back to another version, or delete it."
            ) from error
        return data

    def link(self, name: str, other: str) -> None:
        """Make `other` a second name of the file `name`. Raises StoreError."""
        with _storing(self._states):
            with contextlib.suppress(FileNotFoundError):
                (self._states / other).unlink()
            os.link(self._states / name, self._states / other, follow_symlinks=False)
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
        os.close(self._lock)

    def _find_secret(self, folder: Path) -> bytes:
        path = folder / "secret"
        if not path.exists():
            self._write(folder, path.name, secrets.token_bytes(32))
        return path.read_bytes()

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        temporary = folder / f"{name}.tmp"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data[: len(data) // 2])
            crash_point("file_half_written")
            file.write(data[len(data) // 2 :])
            file.flush()
            crash_point("file_before_flush")
            os.fsync(file.fileno())
        crash_point("file_before_rename")
        os.replace(temporary, folder / name)
        crash_point("file_after_rename")
        _flush(folder)
        crash_point("file_after_flush")


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
        raise StoreError(
            f"Sessions cannot be kept in {folder} ({error.strerror}). Make room or mend its permissions."
        ) from error
