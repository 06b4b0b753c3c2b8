"""An update and its residual are kept together or not at all, sent until answered, and forgotten with their session."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from updates import SCHEMA, update_of

from fednl_runtime.fed_sync.device.database import Database
from fednl_runtime.fed_sync.device.outbox import KEPT_SETTLED, Outbox, OutboxLimits, Upload
from fednl_runtime.fed_sync.device.outbox import SCHEMA as TABLES
from fednl_runtime.fed_sync.update import encode

RESIDUAL = SCHEMA.tensors(np.arange(SCHEMA.size) / 7)


def upload(number: int, base: int = 1, body: bytes = b"12345") -> Upload:
    return Upload(f"update {number:03}", base, 100 + number, body, created=float(number))


@pytest.fixture(name="db")
def db_fixture(tmp_path):
    db = Database(tmp_path / "sync.db", TABLES)
    yield db
    db.close()


@pytest.fixture(name="outbox")
def outbox_fixture(db):
    return Outbox(db, OutboxLimits(updates=3, bytes=100))


def put(outbox: Outbox, item: Upload, *sessions: str) -> None:
    outbox.put(item, SCHEMA.hash, RESIDUAL, sessions)


def test_what_was_put_comes_back_whole_and_in_order(outbox):
    for number in (2, 1):
        put(outbox, upload(number))
    assert outbox.next() == upload(1)
    found = outbox.residual(SCHEMA.hash)
    assert all((found[name] == value).all() for name, value in RESIDUAL.items())


def test_a_residual_is_not_used_for_other_rules(outbox):
    put(outbox, upload(1))
    assert outbox.residual("f" * 64) == {}


def test_an_update_is_next_until_it_is_settled(outbox):
    put(outbox, upload(1))
    put(outbox, upload(2))
    outbox.mark_sent("update 001")
    outbox.mark_sent("update 001")
    assert outbox.next() == dataclasses.replace(upload(1), attempts=2)
    outbox.settle("update 001", "accepted")
    assert outbox.next() == upload(2)
    outbox.settle("update 002", "refused", "stale_base")
    assert outbox.next() is None
    assert [(fate["id"], fate["state"], fate["code"]) for fate in outbox.fates()] == [
        ("update 002", "refused", "stale_base"),
        ("update 001", "accepted", None),
    ]


def test_a_version_has_one_update_also_after_it_was_settled(outbox):
    put(outbox, upload(1, base=4))
    outbox.settle("update 001", "accepted")
    assert outbox.made_for(4)
    assert not outbox.made_for(5)


def test_the_body_of_a_settled_update_leaves_the_file(outbox, db, tmp_path):
    put(outbox, upload(1, body=b"a body to be found"))
    outbox.settle("update 001", "accepted")
    db.scrub()
    assert not any(b"a body to be found" in path.read_bytes() for path in tmp_path.iterdir())


def test_the_oldest_updates_make_room_and_are_counted(outbox):
    for number in range(5):
        put(outbox, upload(number))
    assert outbox.next() == upload(2)
    assert outbox.counts()["pending"] == 3
    assert outbox.counts()["dropped"] == 2
    put(outbox, upload(9, body=b"x" * 98))
    assert outbox.next() == upload(9, body=b"x" * 98)
    assert outbox.counts()["waiting_bytes"] == 98


def test_settled_updates_are_remembered_up_to_a_bound(outbox):
    for number in range(KEPT_SETTLED + 10):
        put(outbox, upload(number))
        outbox.settle(upload(number).id, "accepted")
    assert outbox.counts()["accepted"] == KEPT_SETTLED
    assert outbox.fates()[0]["id"] == f"update {KEPT_SETTLED + 9:03}"


def test_forgetting_a_session_takes_the_waiting_updates_it_taught_and_no_other(outbox, tmp_path):
    put(outbox, upload(1, body=b"of anna and ben"), "anna", "ben")
    put(outbox, upload(2, body=b"of ben alone"), "ben")
    assert outbox.forget("anna") == 1
    assert outbox.next() == upload(2, body=b"of ben alone")
    assert outbox.residual(SCHEMA.hash) == {}
    assert not any(b"of anna and ben" in path.read_bytes() for path in tmp_path.iterdir())
    assert outbox.forget("carla") == 0


def test_a_residual_stays_when_a_session_that_left_nothing_in_it_is_forgotten(outbox):
    put(outbox, upload(1), "anna")
    outbox.forget("ben")
    assert outbox.residual(SCHEMA.hash) != {}


def test_an_answer_to_an_update_forgotten_meanwhile_is_no_trouble(outbox):
    put(outbox, upload(1), "anna")
    outbox.mark_sent("update 001")
    outbox.forget("anna")
    outbox.settle("update 001", "accepted")
    assert outbox.next() is None


def test_what_is_sent_and_what_is_kept_back_add_up_over_rounds(outbox):
    """Error feedback: after any number of updates, all that was sent plus the residual is all that was learnt."""
    sent, learnt = np.zeros(SCHEMA.size), np.zeros(SCHEMA.size)
    for number in range(6):
        fresh = update_of(number)
        residual = outbox.residual(SCHEMA.hash)
        delta = {name: value + residual.get(name, 0) for name, value in fresh.delta.items()}
        encoded = encode(dataclasses.replace(fresh, delta=delta), SCHEMA, "topk")
        outbox.put(upload(number, body=encoded.body[:50]), SCHEMA.hash, encoded.residual, ["anna"])
        learnt += SCHEMA.vector(fresh.delta)
        sent += SCHEMA.vector(delta) - SCHEMA.vector(encoded.residual)
    np.testing.assert_allclose(sent + SCHEMA.vector(outbox.residual(SCHEMA.hash)), learnt, atol=1e-7)


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_outbox import SCHEMA, TABLES, Database, Outbox, RESIDUAL, upload
outbox = Outbox(Database(Path({file!r}), TABLES))
outbox.put(upload(1), SCHEMA.hash, RESIDUAL, ["anna"])
outbox.mark_sent("update 001")
outbox.settle("update 001", "accepted")
"""


@pytest.mark.parametrize(
    ("point", "there", "state"),
    [
        ("outbox_before_commit", False, None),
        ("outbox_after_commit", True, "pending"),
        ("outbox_marked_sent", True, "sent"),
        ("outbox_before_settle", True, "sent"),
    ],
)
def test_kill_9_leaves_update_residual_and_sessions_together_or_none_of_them(tmp_path, point, there, state):
    code = CHILD.format(path=[os.path.dirname(__file__), *sys.path], file=str(tmp_path / "sync.db"))
    child = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FEDNL_CRASH_AT": point}, check=False)
    assert child.returncode == -signal.SIGKILL
    db = Database(tmp_path / "sync.db", TABLES)
    outbox = Outbox(db)
    waiting = outbox.next()
    assert (waiting is not None) == there
    assert (outbox.residual(SCHEMA.hash) != {}) == there
    assert outbox.forget("anna") == there
    assert waiting is None or waiting.attempts == (state == "sent")
    db.close()
