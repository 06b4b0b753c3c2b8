"""Laws of measuring turns: all of them answer in full, and what is kept can be read again."""

from __future__ import annotations

import pytest
from engines import TOKENIZER, NumpyBackend

from fednl_runtime.engine import Engine
from fednl_runtime.speed_sessions import CONCURRENT, begin, finish, keeping, request, turns
from fednl_runtime.state import state_bytes


def test_turns_alone_and_together_answer_in_full():
    backend = NumpyBackend()
    found = turns(backend, TOKENIZER, 5, 1)
    assert [t.turns for t in found] == list(CONCURRENT)
    assert len(backend.calls) == 2 * sum(CONCURRENT) * (1 + 5)  # a prompt of one token, two rounds
    assert all(t.token.median * t.tokens_per_second == pytest.approx(1) for t in found)


def test_keeping_is_measured_on_a_session_that_is_really_stored(tmp_path):
    backend = NumpyBackend()
    found = keeping(backend, TOKENIZER, tmp_path, 2)
    assert found.state_bytes == state_bytes(backend.config)
    assert min(t.low for t in (found.snapshot, found.put, found.commit, found.restore)) > 0
    assert any(path.stat().st_size > found.state_bytes for path in tmp_path.rglob("*") if path.is_file())


def test_a_turn_that_fails_raises_its_error():
    backend = NumpyBackend()
    backend.fail_at = 3
    engine = Engine(backend, TOKENIZER)
    try:
        with pytest.raises(RuntimeError, match="the backend broke"):
            finish(begin(engine, request("s", TOKENIZER, 5))[1])
    finally:
        engine.shutdown()
