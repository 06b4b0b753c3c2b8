"""Small files of a device, replaced whole, for its owner's eyes only."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is whole and on disk when this returns; what was there before is gone."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in the place of another, so that at any moment one of them is there, whole."""
    draft = path.with_name(f"{path.name}.draft")
    write_file(draft, data)
    move_file(draft, path)


def move_file(path: Path, other: Path) -> None:
    """Give a file another name, for good, replacing what had that name."""
    os.replace(path, other)
    descriptor = os.open(other.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
