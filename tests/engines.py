"""A tiny byte-level tokenizer and a NumPy backend, so that the engine runs without a model file."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from models import TINY, random_params
from tokenizers import models, pre_tokenizers

from fednl_runtime.config import HopeConfig
from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.export.weights import recovered
from fednl_runtime.reference import Parameters, run
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import Array, MemoryState, Tokens
from fednl_runtime.store import Journal
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("â", "Ĥ"), ("l", "l"), ("ll", "o")]


def tiny_tokenizer_json() -> str:
    """256 bytes, a few merges (one of them two thirds of a euro sign) and the special token."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for a, b in MERGES:
        vocab[a + b] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str()


TOKENIZER = Tokenizer(tiny_tokenizer_json())
CONFIG = dataclasses.replace(TINY, vocab_size=TOKENIZER.vocab_size)


NO_END = ((TOKENIZER.end_of_text, -100.0),)
"""A logit bias with which an answer goes on to its last token."""
ENDLESS = {"logit_bias": {str(token): bias for token, bias in NO_END}}
"""The same as a field of a request."""


def committed(engine: Engine, session_id: str, owner: str = "") -> Session:
    """The committed version of a session; its arrays are the same objects as long as it is resident."""
    record = engine.sessions.get(SessionKey(owner, session_id))
    return engine.sessions.load(record, record.head)


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; fail after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


class NumpyStream:
    """Rows over the reference, each run by itself; refuses calls that cross a segment and poisons old logits."""

    def __init__(self, backend: NumpyBackend, state: MemoryState) -> None:
        self._backend = backend
        self._rows = [state.row(row) for row in range(len(state.position))]
        self._last: Array | None = None

    def feed(self, tokens: Tokens, adapt: Array, first: int = 0) -> Array:
        """Read tokens `[B, T]` in the rows from `first` on."""
        time.sleep(self._backend.delay_s)
        if self._last is not None:
            self._last.fill(np.nan)
        rows = [self._feed(first + i, tokens[i : i + 1], adapt[i : i + 1]) for i in range(len(tokens))]
        self._last = np.concatenate(rows).astype(np.float32)
        return self._last

    def _feed(self, row: int, tokens: Tokens, adapt: Array) -> Array:
        backend, state = self._backend, self._rows[row]
        start, length = int(state.position[0]), tokens.shape[1]
        assert start % backend.segment + length <= backend.segment, "a call crossed a segment"
        backend.calls.append((start, length))
        if backend.fail_at is not None and start <= backend.fail_at < start + length:
            raise RuntimeError("the backend broke")
        logits, self._rows[row] = run(backend.params, backend.config, tokens, state, adapt)
        return logits

    def snapshot(self, row: int | None = None) -> MemoryState:
        """An owning copy of the state of one row, or of all."""
        return MemoryState.stack(self._rows) if row is None else self._rows[row].copy()

    def put(self, row: int, state: MemoryState) -> None:
        """Replace a row."""
        self._rows[row] = state.copy()

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        self._rows[row], self._rows[other] = self._rows[other], self._rows[row]


class NumpyBackend:
    """The reference as a backend; records the calls it gets and breaks where it is told to."""

    def __init__(self, config: HopeConfig = CONFIG, segment: int = 7, seed: int = 0) -> None:
        self.config, self.segment = config, segment
        self.fingerprint = f"random {seed}"
        self.params: Parameters = {n: p.astype(np.float32) for n, p in random_params(config, seed).items()}
        self.calls: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        self.delay_s = 0.0

    def open(self, state: MemoryState) -> NumpyStream:
        """A stream that continues from `state`."""
        return NumpyStream(self, state)

    def with_rules(self, rules: Mapping[str, Array]) -> NumpyBackend:
        """A copy with some rules replaced; it notes its calls where this one does."""
        other = copy.copy(self)
        other.params = {**self.params, **{n: p.reshape(self.params[n].shape) for n, p in recovered(rules).items()}}
        return other


@contextmanager
def running_engine(
    limits: EngineLimits | None = None, segment: int = 7, folder: Path | None = None, journal: Journal | None = None
) -> Iterator[Engine]:
    """An engine on the tiny backend, shut down at the end."""
    engine = Engine(NumpyBackend(segment=segment), TOKENIZER, limits, folder=folder, journal=journal)
    try:
        yield engine
    finally:
        engine.shutdown()


def write_tiny_model(path: Path) -> Path:
    """A model file at `path`, of the tiny shapes but with periods that leave segments of 8 tokens."""
    from fednl_runtime.export.graph import export_model

    config = dataclasses.replace(CONFIG, memory_period=8, top_period=8, cms_periods=(16, 48))
    export_model(random_params(config), config, tiny_tokenizer_json(), path, name="tiny")
    return path
