"""Laws of state files: whole or not there, private, without telling names, for one process at a time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fednl_runtime.errors import StateError, StoreError
from fednl_runtime.files import DiskFiles

DATA = bytes(range(251)) * 9


@pytest.fixture(name="files")
def files_fixture(tmp_path: Path) -> Iterator[DiskFiles]:
    files = DiskFiles(tmp_path / "sessions")
    yield files
    files.close()


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_read_as_it_was_written(files: DiskFiles) -> None:
    files.write("x", DATA)
    assert files.read("x", len(DATA)) == DATA
    files.write("x", b"other")
    assert files.read("x", len(DATA)) == b"other"


def test_no_more_is_read_than_the_room_for_it_and_one_byte(files: DiskFiles) -> None:
    files.write("x", DATA)
    assert len(files.read("x", 100)) == 101


def test_a_missing_file_and_a_link_are_refused(files: DiskFiles, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(DATA)
    (tmp_path / "sessions/states/link").symlink_to(tmp_path / "elsewhere")
    for name in ("link", "nothing"):
        with pytest.raises(StateError, match="cannot be read"):
            files.read(name, 10**6)


def test_folders_and_files_are_their_owners_alone(files: DiskFiles, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write("x", DATA)
        DiskFiles(tmp_path / "deep/er").close()
    finally:
        os.umask(before)
    folder = tmp_path / "sessions"
    assert [mode(folder / name) for name in (".", "states")] == [0o700, 0o700]
    assert [mode(folder / name) for name in ("lock", "secret", "states/x")] == [0o600, 0o600, 0o600]
    assert [mode(tmp_path / name) for name in ("deep", "deep/er")] == [0o700, 0o700]


def test_names_tell_nothing_and_are_another_folders_own(files: DiskFiles, tmp_path: Path) -> None:
    name = files.name("owner-key", "my-session", 3)
    assert "owner" not in name
    assert "session" not in name
    assert name == files.name("owner-key", "my-session", 3)
    other = DiskFiles(tmp_path / "other")
    assert name != other.name("owner-key", "my-session", 3)
    other.close()


def test_a_folder_is_found_again_with_its_names(tmp_path: Path) -> None:
    first = DiskFiles(tmp_path)
    first.write(name := first.name("o", "s", 1), DATA)
    first.close()
    second = DiskFiles(tmp_path)
    assert second.names() == [name] == [second.name("o", "s", 1)]
    second.close()


def test_a_second_process_is_refused_until_the_first_lets_go(files: DiskFiles, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Another process"):
        DiskFiles(tmp_path / "sessions")
    files.close()
    DiskFiles(tmp_path / "sessions").close()


def test_closing_twice_closes_nobody_elses_file(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    files.close()
    with (tmp_path / "mine").open("wb") as mine:
        files.close()
        mine.write(b"still open")


@pytest.mark.parametrize("damage", [None, b"", b"short"])
def test_a_folder_without_its_secret_is_refused_and_loses_nothing(tmp_path: Path, damage: bytes | None) -> None:
    files = DiskFiles(tmp_path)
    files.write("x", DATA)
    files.close()
    secret = (tmp_path / "secret").read_bytes()
    (tmp_path / "secret").unlink()
    if damage is not None:
        (tmp_path / "secret").write_bytes(damage)
    with pytest.raises(StoreError, match="Restore it"):
        DiskFiles(tmp_path)
    (tmp_path / "secret").write_bytes(secret)
    files = DiskFiles(tmp_path)
    assert files.read("x", len(DATA)) == DATA
    files.close()


def test_half_written_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    DiskFiles(tmp_path).close()
    (tmp_path / "states/x.tmp").write_bytes(DATA)
    files = DiskFiles(tmp_path)
    assert files.names() == []
    files.close()


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_write_that_fails_says_so_and_leaves_what_was_there(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files.write("x", DATA)
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    with pytest.raises(StoreError, match="No space left"):
        files.write("x", b"new")
    with pytest.raises(StoreError, match="No space left"):
        files.write("y", b"new")
    monkeypatch.undo()
    assert files.names() == ["x"]
    assert files.read("x", len(DATA)) == DATA


def test_a_link_is_the_same_file_and_outlives_its_origin(files: DiskFiles, tmp_path: Path) -> None:
    files.write("x", DATA)
    files.write("y", b"old")
    files.link("x", "y")
    assert (tmp_path / "sessions/states/y").stat().st_nlink == 2
    files.delete("x")
    assert files.read("y", len(DATA)) == DATA


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_where_a_file_cannot_have_two_names_it_is_copied(
    files: DiskFiles, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    files.write("x", DATA)
    monkeypatch.setattr(os, "link", failing(error))
    files.link("x", "y")
    assert files.read("y", len(DATA)) == DATA


def test_a_link_that_cannot_be_made_says_why(files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match="missing"):
        files.link("nothing", "y")
    files.write("x", DATA)
    monkeypatch.setattr(os, "link", failing(errno.EROFS))
    with pytest.raises(StoreError, match="Read-only"):
        files.link("x", "y")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be kept"):
        DiskFiles(tmp_path / "file")
