"""Killed at any point, a process leaves every session at its last committed version, and nothing else."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crashing import ACTIONS, FORK, KEY, TEXTS, engine_on, request
from turns import contents, head, say, tokens_of

from fednl_runtime.engine import Engine
from fednl_runtime.errors import SessionNotFoundError
from fednl_runtime.turn import TurnReport

ROOT = Path(__file__).parents[2]
TURN = [
    ("turn_in_prompt", 2),
    ("turn_in_prompt:2", 2),
    ("turn_in_answer", 2),
    ("turn_in_answer:4", 2),
    ("turn_after_answer", 2),
    ("store_before_file", 2),
    ("file_half_written", 2),
    ("file_before_flush", 2),
    ("file_before_rename", 2),
    ("file_after_rename", 2),
    ("file_after_flush", 2),
    ("records_before_commit", 2),
    ("records_after_commit", 3),
    ("store_before_unlink", 3),
    ("store_after_commit", 3),
]
"""The points of a turn, and the version that is found afterwards."""
OTHERS = [
    ("rollback", "records_before_commit", "before"),
    ("rollback", "records_after_commit", "after"),
    ("reset", "records_before_commit", "before"),
    ("reset", "records_after_commit", "after"),
    ("reset", "store_before_unlink", "after"),
    ("snapshot", "records_before_commit", "before"),
    ("snapshot", "records_after_commit", "after"),
    ("fork", "fork_after_link", "before"),
    ("fork", "fork_after_link:2", "before"),
    ("fork", "records_before_commit", "before"),
    ("fork", "records_after_commit", "after"),
    ("import", "file_half_written", "before"),
    ("import", "file_after_flush", "before"),
    ("import", "records_before_commit", "before"),
    ("import", "records_after_commit", "after"),
    ("delete", "delete_before_commit", "before"),
    ("delete", "delete_after_commit", "after"),
    ("delete", "store_before_unlink", "after"),
    ("delete", "store_before_unlink:2", "after"),
    ("delete", "delete_after_files", "after"),
]
"""Other changes and their points, and whether the state before or after them is found afterwards."""


@pytest.fixture(name="origin", scope="module")
def origin_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a session of two turns, from an engine that was shut down."""
    folder = tmp_path_factory.mktemp("origin") / "sessions"
    engine = engine_on(folder)
    for turn in (0, 1):
        list(engine.turn(request(turn)))
    engine.shutdown()
    return folder


@pytest.fixture(name="folder")
def folder_fixture(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "sessions"))


@pytest.fixture(name="unbroken", scope="module")
def unbroken_fixture() -> dict[int, tuple[list[Any], str]]:
    """Events and memory of each turn of an engine that was never stopped."""
    engine = engine_on(None)
    found = {turn: (list(engine.turn(request(turn))), head(engine)) for turn in range(len(TEXTS))}
    engine.shutdown()
    return found


@pytest.fixture(name="reopened")
def reopened_fixture(folder: Path) -> Iterator[list[Engine]]:
    """The engines that a test opens, to be shut down."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.shutdown()


def killed(folder: Path, action: str, point: str) -> None:
    """Do something to a folder in a process that is killed at a point."""
    command = [sys.executable, str(ROOT / "tests/crashing.py"), str(folder), action, point]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def without_persisted(events: list[Any]) -> list[Any]:
    """Events whose report does not say where and how often the turn was told of."""
    told = {"persisted": False, "replayed": False}
    return [dataclasses.replace(e, **told) if isinstance(e, TurnReport) else e for e in events]


def no_strays(engine: Engine) -> bool:
    known = {engine.sessions._vault.files.name(*content) for content in engine.sessions._vault.records.contents()}
    return set(engine.sessions._vault.files.names()) == known


@pytest.mark.parametrize(("point", "version"), TURN, ids=[point for point, _ in TURN])
def test_a_killed_turn_is_learnt_once_and_the_session_goes_on(
    folder: Path, reopened: list[Engine], unbroken: dict[int, tuple[list[Any], str]], point: str, version: int
) -> None:
    killed(folder, "turn", point)
    engine = engine_on(folder)
    reopened.append(engine)
    calls: list[tuple[int, int]] = engine.backend.calls  # type: ignore[attr-defined]
    assert engine.sessions.get(KEY).head.version == version
    assert head(engine) == unbroken[version - 1][1]
    assert no_strays(engine)

    again = list(engine.turn(request(2)))
    assert again[-1].replayed == (version == 3)
    assert bool(calls) == (version == 2)
    assert tokens_of(again) == tokens_of(unbroken[2][0])
    assert head(engine) == unbroken[2][1]

    calls.clear()
    seen = engine.sessions.get(KEY).head.tokens_seen
    events = list(engine.turn(request(3)))
    assert calls[0][0] == seen
    assert sum(count for _, count in calls) == events[-1].prompt_tokens + events[-1].completion_tokens
    assert without_persisted(events) == without_persisted(unbroken[3][0])
    assert head(engine) == unbroken[3][1]
    assert no_strays(engine)


def found(engine: Engine) -> list[Any]:
    """What there is of the session and of its fork: head, versions and memory."""
    result: list[Any] = []
    for key in (KEY, FORK):
        try:
            record = engine.sessions.get(key)
        except SessionNotFoundError:
            result.append(None)
            continue
        marks = [dataclasses.replace(mark, created=0) for mark in record.marks]
        kinds = [update.kind for update in engine.sessions.updates(key)]
        result.append((marks, kinds, head(engine, key.id)))
    return result


@pytest.mark.parametrize(("action", "point", "state"), OTHERS, ids=[f"{a}-{p}" for a, p, _ in OTHERS])
def test_any_other_change_that_is_killed_was_made_whole_or_not_at_all(
    folder: Path, reopened: list[Engine], action: str, point: str, state: str
) -> None:
    killed(folder, action, point)
    engine, memory = engine_on(folder), engine_on(None)
    reopened += [engine, memory]
    for turn in (0, 1):
        list(memory.turn(request(turn)))
    if state == "after":
        ACTIONS[action](memory)
    assert found(engine) == found(memory)
    assert no_strays(engine)
    for each in (engine, memory):
        say(each, TEXTS[2])
    assert head(engine) == head(memory)


def test_a_session_whose_deletion_was_killed_leaves_no_byte_once_the_folder_is_opened(folder: Path) -> None:
    killed(folder, "delete", "delete_after_commit")
    assert b"key 1" in contents(folder)
    engine = engine_on(folder)
    left = contents(folder)
    engine.shutdown()
    assert b"key 1" not in left
    assert b"digest 1" not in left
    assert b".safetensors" not in left


@pytest.mark.parametrize("point", ["file_half_written", "file_before_rename", "file_after_rename"])
def test_a_folder_whose_making_was_killed_can_be_opened(tmp_path: Path, point: str) -> None:
    killed(tmp_path / "new", "open", point)
    engine = engine_on(tmp_path / "new")
    assert say(engine, TEXTS[0])[1].version == 1
    engine.shutdown()


@pytest.mark.parametrize("point", ["turn_after_answer", "file_after_flush", "records_before_commit"])
def test_a_killed_first_turn_leaves_no_session(folder: Path, reopened: list[Engine], point: str) -> None:
    killed(folder, "first turn", point)
    engine = engine_on(folder)
    reopened.append(engine)
    assert engine.sessions.stats()["sessions"] == 1
    assert no_strays(engine)


def test_every_crash_point_is_tried() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "runtime").glob("*.py"))
    points = set(re.findall(r'crash_point\("(\w+)"\)', sources))
    tried = {point.partition(":")[0] for point in [p for p, _ in TURN] + [p for _, p, _ in OTHERS]}
    assert points == tried
