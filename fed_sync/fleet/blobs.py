"""Files by their content: written whole, read back only unharmed."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fednl_runtime.fed_sync.errors import BlobError


class Blobs(Protocol):
    """Where bytes are kept under their SHA-256; implementations may be a disk or an object store."""

    def put(self, data: bytes) -> str:
        """Keep bytes for good before returning their SHA-256 in hex; the same bytes are kept once."""
        ...

    def get(self, sha256: str) -> bytes:
        """The bytes with that digest. Raises BlobError if they are missing or harmed."""
        ...

    def delete(self, sha256: str) -> None:
        """Forget bytes; missing ones are no error."""
        ...

    def names(self) -> Iterator[tuple[str, float]]:
        """The digest of everything kept, and when it was last put, in seconds since 1970."""
        ...


class DiskBlobs:
    """Blobs in a folder, in 256 subfolders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256

    def put(self, data: bytes) -> str:
        """Write bytes so that after a power cut they are whole or missing."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        draft = path.with_name(f".{secrets.token_hex(8)}")
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)  # also over an old copy: its age starts anew, so that cleaning up leaves it
        for folder in (path.parent, self._folder):
            _flush(folder)
        return sha256

    def get(self, sha256: str) -> bytes:
        """Read bytes and check their digest."""
        try:
            data = self._path(sha256).read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BlobError(f"The file {sha256} is missing or damaged. Restore the state folder from a copy.")
        return data

    def delete(self, sha256: str) -> None:
        """Remove a file."""
        self._path(sha256).unlink(missing_ok=True)

    def names(self) -> Iterator[tuple[str, float]]:
        """All files, drafts that a crash left behind included."""
        for path in self._folder.glob("??/*"):
            yield path.name, path.stat().st_mtime


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
