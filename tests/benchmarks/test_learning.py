"""Laws of the learning benchmarks: each figure compares what it says it compares."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import repetition
import shift
from click.testing import CliRunner
from engines import CONFIG, TOKENIZER, NumpyBackend, write_tiny_model
from learning import main
from models import random_tokens
from recall import PAIRS, answers, facts
from repetition import rows
from streams import at_lengths, summary, table

from fednl_runtime.state import MemoryState

CALM = dataclasses.replace(CONFIG, eta_max=0.2)
RNG_SEED = 5


def words_tokenizer(monkeypatch):
    """The tiny tokenizer, its single bytes counting as words."""
    monkeypatch.setattr("recall.words", lambda tokenizer: list(range(1, 60)))
    return TOKENIZER


def test_a_shorter_stream_is_the_beginning_of_a_longer_one():
    scores = {arm: np.arange(10.0) for arm in ("on", "reset", "frozen")}
    assert at_lengths(scores, (4, 10, 11)) == {
        4: dict.fromkeys(scores, 1.5),
        10: dict.fromkeys(scores, 4.5),
    }


def test_the_summary_averages_and_names_the_worst():
    files = {"a": {8: {"on": 1.0, "reset": 2.0, "frozen": 4.0}}, "b": {8: {"on": 3.0, "reset": 2.0, "frozen": 3.0}}}
    assert summary(files, (8, 32)) == {
        8: {
            "files": 2,
            "on_vs_reset_percent": 0.0,
            "worst_on_vs_reset_percent": 50.0,
            "on_vs_frozen_percent": -37.5,
            "same_files": {8: 0.0},
        }
    }


def test_the_gap_at_two_lengths_is_that_of_the_same_files():
    half, third = {"on": 1.0, "reset": 2.0, "frozen": 2.0}, {"on": 2.0, "reset": 3.0, "frozen": 4.0}
    report = summary({"short": {8: third}, "long": {8: half, 32: third}}, (8, 32))
    assert report[32]["same_files"] == pytest.approx({8: -50.0, 32: -100 / 3})


def test_the_table_has_a_row_a_file_and_leaves_out_lengths_that_a_file_lacks():
    rows = table({"a": {8192: {"on": 1.0, "reset": 2.0, "frozen": 4.0}}}, (8192, 32768)).splitlines()
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|")
    assert rows[2] == "| a | 8,192 | 1.000 | 2.000 | 4.000 | -75.0 % | -50.0 % | -50.0 % |  |"


def test_facts_hold_their_questions_and_values(monkeypatch):
    text, questions, values = facts(words_tokenizer(monkeypatch), np.random.default_rng(RNG_SEED))
    joined = TOKENIZER.decode_bytes(text.tolist())
    for question, value in zip(questions, values, strict=True):
        assert TOKENIZER.decode_bytes([*question, value]) + b"." in joined
    assert len(set(values)) == PAIRS


def test_a_question_leaves_the_session_as_it_was():
    backend = NumpyBackend(CALM)
    stream = backend.open(MemoryState.zeros(CALM))
    stream.feed(np.ones((1, 3), np.int64), np.ones((1, 2)))
    state = stream.snapshot()
    before = state.copy()
    questions = [np.full(5, i) for i in range(PAIRS)]
    accuracy, lead = answers(backend, state, questions, np.arange(PAIRS), (1.0, 1.0))
    assert 0 <= accuracy <= 1
    assert np.isfinite(lead)
    assert all(np.array_equal(state.tensors[n], before.tensors[n]) for n in before.tensors)


def test_the_repeated_passage_and_the_text_before_it_are_the_same_in_every_stream():
    text = np.arange(3 * repetition.PASSAGE + 64)
    verbatim, near, control = rows(text[: 2 * repetition.PASSAGE + 64], 64, np.random.default_rng(RNG_SEED))
    size = repetition.PASSAGE
    assert (verbatim[:size] == verbatim[size + 64 : -1]).all()
    assert 0.05 < (near[:size] != verbatim[:size]).mean() < 0.2
    assert not set(control[:size]) & set(verbatim[:size])
    assert (near[size:] == verbatim[size:]).all()
    assert (control[size:] == verbatim[size:]).all()


def test_a_stream_is_back_at_the_first_bin_that_is_near():
    stay = np.ones(1024)
    changed = np.repeat([1.5, 1.03, 1.01, 1.2], 256)
    assert shift.tokens_until_back(changed, stay) == 512
    assert shift.tokens_until_back(stay + 1, stay) == 1024


def test_what_is_retained_lies_between_a_fresh_session_and_one_that_never_left():
    assert shift.retained(np.array([1.5]), stay=np.array([1.0]), fresh=np.array([2.0])) == 0.5


def test_shift_compares_the_same_tokens(monkeypatch):
    """With one source there is no detour: the second visit is the session that never left."""
    monkeypatch.setattr(shift, "PIECE", 32)
    monkeypatch.setattr(shift, "BIN", 8)
    text = random_tokens(CALM, 1, 65)[0]
    result = shift.shift(NumpyBackend(CALM, segment=1), [text])
    assert result["back"] == []
    assert result["retained"] == [pytest.approx(1)]
    assert result["forgotten_percent"] == [pytest.approx(0, abs=1e-6)]


def test_the_streams_command_prints_one_json_object_last(tmp_path):
    model = write_tiny_model(tmp_path / "tiny.onnx")
    text = tmp_path / "text.txt"
    text.write_text("the hello " * 300)
    tokens = len(TOKENIZER.encode("the hello " * 300)) + 1
    result = CliRunner().invoke(main, ["streams", str(text), "--model", str(model), "--plot", str(tmp_path / "p.png")])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])
    assert set(report["files"]["text"]) == {str(tokens - 1)}
    assert report["lengths"] == {}
    assert (tmp_path / "p.png").stat().st_size > 0


def test_a_text_that_is_too_short_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the hello")
    model = write_tiny_model(tmp_path / "tiny.onnx")
    result = CliRunner().invoke(main, ["needles", str(text), "--model", str(model)])
    assert result.exit_code == 2
    assert "None of the files has 32,768 tokens" in result.output
