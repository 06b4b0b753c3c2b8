"""Recent text stays within its bytes, keeps sessions apart, forgets for good, and never fails a turn."""

from __future__ import annotations

import stat

import numpy as np
import pytest

from fednl_runtime.errors import StoreError
from fednl_runtime.fed_sync.device.folder import Device
from fednl_runtime.fed_sync.device.recent import RecentText
from fednl_runtime.session import SessionKey

END = 9
ANNA, BEN = SessionKey("key 1", "anna"), SessionKey("key 1", "ben")


@pytest.fixture(name="recent")
def recent_fixture(tmp_path):
    recent = RecentText(tmp_path / "recent.db", END, max_bytes=80)
    yield recent
    recent.close()


def test_texts_come_back_session_by_session_each_with_an_end(recent):
    recent.record(ANNA, [1, 2])
    recent.record(BEN, (5,))
    recent.record(ANNA, [3])
    found = recent.read()
    assert found.tokens.tolist() == [1, 2, 3, END, 5, END]
    assert found.tokens.dtype == np.int64
    assert found.sessions == {recent.tag(ANNA), recent.tag(BEN)}


def test_the_oldest_text_makes_room(recent):
    for start in range(0, 70, 7):
        recent.record(ANNA, list(range(start, start + 7)))
    assert recent.read().tokens.tolist() == [*range(56, 70), END]
    assert recent.tokens() == 14


def test_of_a_turn_longer_than_the_ring_the_end_is_kept(recent):
    recent.record(ANNA, list(range(100)))
    assert recent.read().tokens.tolist() == [*range(80, 100), END]


def test_text_after_a_piece_is_what_was_recorded_since(recent):
    recent.record(ANNA, [1, 2])
    before = recent.read()
    recent.record(BEN, [4])
    since = recent.read(before.last)
    assert since.tokens.tolist() == [4, END]
    assert since.sessions == {recent.tag(BEN)}
    assert recent.read(since.last).tokens.tolist() == []
    assert recent.read(since.last).last == since.last


def test_a_forgotten_session_leaves_no_byte_in_the_files(recent, tmp_path):
    secret = [1234567, 7654321, 1234567]
    data = np.asarray(secret, "<u4").tobytes()
    recent.record(BEN, [1])
    recent.record(ANNA, secret)
    assert any(data in path.read_bytes() for path in tmp_path.iterdir())
    recent.forget(ANNA)
    assert not any(data in path.read_bytes() for path in tmp_path.iterdir())
    assert recent.read().sessions == {recent.tag(BEN)}


def test_names_of_sessions_and_keys_are_not_in_the_file(recent, tmp_path):
    recent.record(ANNA, [1, 2, 3])
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"anna" not in stored
    assert b"key 1" not in stored


def test_tags_outlive_a_restart_and_tell_owners_apart(tmp_path):
    tags = []
    for _ in range(2):
        recent = RecentText(tmp_path / "recent.db", END)
        tags.append((recent.tag(ANNA), recent.tag(SessionKey("key 2", "anna"))))
        recent.record(ANNA, [7])
        recent.close()
    assert tags[0] == tags[1]
    assert tags[0][0] != tags[0][1]


def test_the_file_is_its_owners_alone(recent, tmp_path):
    recent.record(ANNA, [1])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_turn_goes_on_when_its_text_cannot_be_kept(recent, caplog):
    recent.close()
    recent.record(ANNA, [1, 2])
    assert "was not kept for training" in caplog.text
    with pytest.raises(StoreError, match="cannot be used"):
        recent.forget(ANNA)


def test_a_damaged_file_is_set_aside_and_the_device_goes_on(tmp_path, caplog):
    path = tmp_path / "recent.db"
    path.write_bytes(b"this is no database at all " * 400)
    recent = RecentText(path, END)
    recent.record(ANNA, [1])
    assert recent.tokens() == 1
    recent.close()
    assert "was set aside" in caplog.text
    assert len(list(tmp_path.glob("recent.db.damaged-*"))) == 1


def test_a_file_whose_pages_were_overwritten_is_set_aside(tmp_path):
    path = tmp_path / "recent.db"
    recent = RecentText(path, END)
    for i in range(300):
        recent.record(ANNA, list(range(i, i + 50)))
    recent.close()
    data = bytearray(path.read_bytes())
    data[4096 : len(data) - 4096] = b"\xa5" * (len(data) - 8192)
    path.write_bytes(data)
    recent = RecentText(path, END)
    assert recent.tokens() == 0
    recent.close()


def test_a_device_makes_its_folder_and_those_above_it_for_its_owner_alone(tmp_path):
    folder = tmp_path / "new" / "sync"
    Device(folder, end_of_text=0).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
