"""A process that does one thing to a folder of sessions and is killed on the way, or says that it was not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from engines import TOKENIZER, NumpyBackend
from turns import ask, say

from fednl_runtime.crash import VARIABLE
from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.session import SessionKey
from fednl_runtime.turn import Retry, TurnRequest
from fednl_runtime.vault import StoreLimits

KEY, FORK = SessionKey("", "a"), SessionKey("", "fork")
TEXTS = ("hello the other day", "the euro € fell", "all the other hellos", "and the end")
"""What the turns of a session read: each is longer than a segment of the tiny backend."""


def request(turn: int) -> TurnRequest:
    """The request of a session's turn, which may be sent again."""
    return ask(TEXTS[turn], max_tokens=4, retry=Retry(f"digest {turn}", f"key {turn}"))


def engine_on(folder: Path | None, versions: int = 2) -> Engine:
    """An engine that keeps few versions, so that each turn deletes a file too."""
    limits = EngineLimits(store=StoreLimits(versions=versions))
    return Engine(NumpyBackend(), TOKENIZER, limits, folder=folder)


def turn(engine: Engine) -> None:
    """The third turn of the session."""
    for _ in engine.turn(request(2)):
        pass


ACTIONS: dict[str, Callable[[Engine], object]] = {
    "turn": turn,
    "first turn": lambda engine: say(engine, TEXTS[0], session_id="new"),
    "rollback": lambda engine: engine.sessions.rollback(KEY),
    "reset": lambda engine: engine.sessions.reset(KEY),
    "snapshot": lambda engine: engine.sessions.snapshot(KEY, "name"),
    "fork": lambda engine: engine.sessions.fork(KEY, FORK.id),
    "import": lambda engine: engine.sessions.import_(FORK, engine.sessions.export(KEY)),
    "delete": lambda engine: engine.sessions.delete(KEY),
}


def main(folder: Path, action: str, point: str) -> None:
    """Open the folder, then act on it with a crash point set; `open` opens it with the point set."""
    if action == "open":
        os.environ[VARIABLE] = point
    engine = engine_on(folder)
    os.environ[VARIABLE] = point
    if action != "open":
        ACTIONS[action](engine)
    os.environ.pop(VARIABLE)
    engine.shutdown()
    print("survived")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
