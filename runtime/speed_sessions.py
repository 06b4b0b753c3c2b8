"""How fast turns are through the engine, and what it takes to keep a session and to take it up again."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fednl_runtime.backend import Backend
from fednl_runtime.engine import Engine, EngineLimits, Outcome, Turn
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.state_file import StateFormat
from fednl_runtime.stopwatch import Timing, interleaved, timed
from fednl_runtime.store import SessionStore
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import TokenEvent, TurnRequest
from fednl_runtime.vault import StoreLimits

CONCURRENT = (1, 8)
KEY = SessionKey("", "measured")


@dataclasses.dataclass(frozen=True)
class Turns:
    """Answers of so many turns at once, with sampling: tokens a second of them all, and the seconds of a token."""

    turns: int
    tokens_per_second: float
    token: Timing


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Seconds of what is done with a session's memory.

    `snapshot` copies it out of a running turn and `put` into one; `commit` stores the version a turn ended
    with, on disk; `restore` reads it from there and checks it, as after a restart.
    """

    state_bytes: int
    snapshot: Timing
    put: Timing
    commit: Timing
    restore: Timing


def turns(backend: Backend, tokenizer: Tokenizer, tokens: int, rounds: int) -> list[Turns]:
    """Turns of `tokens` tokens each through the engine, one alone and several at once, each learning in its session."""
    engine = Engine(backend, tokenizer, EngineLimits(slots=max(CONCURRENT), max_tokens=tokens))
    try:
        works = {str(count): together(engine, count, tokens) for count in CONCURRENT}
        timings = interleaved(works, rounds)
    finally:
        engine.shutdown()
    found = [(count, timings[str(count)]) for count in CONCURRENT]
    return [Turns(n, n * tokens / timing.median, timing.each(n * tokens)) for n, timing in found]


def request(session_id: str, tokenizer: Tokenizer, tokens: int, seed: int = 0) -> TurnRequest:
    """A turn that answers a short prompt with exactly so many tokens."""
    no_end = ((tokenizer.end_of_text, -100.0),)
    params = SamplingParams(0.8, top_p=0.95, seed=seed, max_tokens=tokens, logit_bias=no_end)
    return TurnRequest((tokenizer.end_of_text,), params, session_id)


def together(engine: Engine, count: int, tokens: int) -> Callable[[], None]:
    """A function that runs so many turns at once, each in a session of its own, and commits none."""

    def work() -> None:
        started = [begin(engine, request(f"{i}", engine.tokenizer, tokens, i)) for i in range(count)]
        for turn, inbox in started:
            chosen, _ = finish(inbox)
            turn.close()
            assert chosen == tokens, "nothing ends an answer before its last token"

    return work


def begin(engine: Engine, wanted: TurnRequest) -> tuple[Turn, queue.SimpleQueue[Any]]:
    """Start a turn; its events come into the queue."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return engine.start(wanted, inbox.put), inbox


def finish(inbox: queue.SimpleQueue[Any]) -> tuple[int, Outcome]:
    """Wait for a turn's end: how many tokens it chose, and what it came to. Raises the turn's error."""
    chosen = 0
    while not isinstance(event := inbox.get(), Outcome):
        if isinstance(event, Exception):
            raise event
        chosen += isinstance(event, TokenEvent)
    return chosen, event


def keeping(backend: Backend, tokenizer: Tokenizer, folder: Path, rounds: int) -> Keeping:
    """Measure what keeping a session takes, in a folder that nobody else uses. Raises StoreError."""
    engine = Engine(backend, tokenizer, folder=folder)
    try:
        commits = [commit_one(engine) for _ in range(rounds + 1)][1:]
    finally:
        engine.shutdown()
    stream = backend.open(MemoryState.zeros(backend.config))
    state = stream.snapshot(0)
    form = StateFormat(backend.config, backend.fingerprint, tokenizer.fingerprint)
    works: dict[str, Callable[[], object]] = {
        "snapshot": lambda: stream.snapshot(0),
        "put": lambda: stream.put(0, state),
    }
    restores = [restore_one(form, folder) for _ in range(rounds + 1)][1:]
    timings = interleaved(works, rounds)
    wall, cpu = (list(part) for part in zip(*commits, strict=True))
    again, again_cpu = (list(part) for part in zip(*restores, strict=True))
    return Keeping(state.nbytes, timings["snapshot"], timings["put"], Timing.of(wall, cpu), Timing.of(again, again_cpu))


def commit_one(engine: Engine) -> tuple[float, float]:
    """Wall and CPU seconds of the commit of one short turn."""
    turn, inbox = begin(engine, request(KEY.id, engine.tokenizer, 2))
    _, outcome = finish(inbox)
    return timed(lambda: turn.commit(outcome))


def restore_one(form: StateFormat, folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds in which a store that was just opened reads the session's last version."""
    store = SessionStore(form, StoreLimits(), folder)
    found: list[Session] = []
    try:
        record = store.get(KEY)
        took = timed(lambda: found.append(store.load(record, record.head)))
    finally:
        store.close()
    assert all(np.isfinite(t).all() for t in found[0].state.tensors.values()), "what was stored is sound"
    return took
