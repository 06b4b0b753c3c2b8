"""Turns on the tiny model, and memories to compare bit for bit."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines import NO_END, TOKENIZER, committed

from fednl_runtime.engine import Engine, Outcome, Turn
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import Session
from fednl_runtime.turn import PromptEvent, TokenEvent, TurnReport, TurnRequest

TEXT = "hello the other day"


def ask(text: str = TEXT, session_id: str | None = "a", max_tokens: int = 3, **fields: Any) -> TurnRequest:
    """A turn that reads `text` and answers with exactly `max_tokens` tokens."""
    params = fields.pop("params", SamplingParams(seed=3, max_tokens=max_tokens, logit_bias=NO_END))
    return TurnRequest(tuple(TOKENIZER.encode(text)), params, session_id, **fields)


def say(engine: Engine, *args: Any, **fields: Any) -> tuple[list[PromptEvent | TokenEvent], TurnReport]:
    """The events and the report of a turn that `ask` describes."""
    *events, report = engine.turn(ask(*args, **fields))
    assert isinstance(report, TurnReport)
    return [event for event in events if not isinstance(event, TurnReport)], report


def tokens_of(events: Sequence[object]) -> list[int]:
    """The tokens of an answer."""
    return [event.token for event in events if isinstance(event, TokenEvent)]


def bits(session: Session) -> str:
    """A digest of everything in a memory: equal means equal bit for bit."""
    tensors = {**session.state.tensors, "position": session.state.position}
    if session.logits is not None:
        tensors["logits"] = session.logits
    told = hashlib.sha256(session.tail)
    for name in sorted(tensors):
        told.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        told.update(np.ascontiguousarray(tensors[name]).tobytes())
    return told.hexdigest()


def head(engine: Engine, session_id: str = "a", owner: str = "") -> str:
    """The digest of a session's committed memory."""
    return bits(committed(engine, session_id, owner))


def started(engine: Engine, request: TurnRequest) -> tuple[Turn, queue.SimpleQueue[Any]]:
    """A turn that runs by itself, and its inbox."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return engine.start(request, inbox.put), inbox


def outcome_of(inbox: queue.SimpleQueue[Any]) -> Outcome:
    """How a started turn ended; its exception is raised."""
    while not isinstance(event := inbox.get(timeout=60), Outcome):
        if isinstance(event, Exception):
            raise event
    return event


def contents(folder: Path) -> bytes:
    """Every byte of every file below a folder, and every name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return b"\0".join(str(path).encode() + b"\0" + path.read_bytes() for path in paths)
