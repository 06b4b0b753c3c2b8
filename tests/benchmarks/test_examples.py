"""Laws of the worked examples: the log, its labels and the keys that are counted."""

from __future__ import annotations

import anomaly
import numpy as np
import pytest
from anomaly import average_precision, generate, line_scores, precision_at_faults, tokenise
from autocomplete import saved_keys, without_history
from engines import TOKENIZER, NumpyBackend
from models import random_tokens

from fednl_runtime import evaluate as ev


def test_a_log_is_the_same_for_the_same_seed_and_has_faults_only_after_the_warm_up():
    lines, kinds = generate(600, 0.1, np.random.default_rng(0))
    assert (lines, kinds) == generate(600, 0.1, np.random.default_rng(0))
    assert not any(kinds[: anomaly.WARM_UP])
    assert set(kinds) == {"", *anomaly.FAULTS}
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)


def test_a_line_scores_the_sum_of_its_own_tokens():
    lines = ["the hello\n", "x\n"]
    tokens, owners = tokenise(TOKENIZER, lines)
    assert TOKENIZER.decode_bytes(tokens.tolist()) == b"the hello\nx\n"
    scores = np.arange(1.0, len(tokens))
    first = len(TOKENIZER.encode(lines[0]))
    assert line_scores(scores, owners).tolist() == [scores[:first].sum(), scores[first:].sum()]


def test_precision_is_one_when_faults_come_first_and_their_share_when_scores_say_nothing():
    faulty = np.array([False, True, False, True])
    assert average_precision(np.array([0.0, 3.0, 1.0, 2.0]), faulty) == 1
    assert precision_at_faults(np.array([0.0, 3.0, 1.0, 2.0]), faulty) == 1
    assert average_precision(np.array([3.0, 0.0, 2.0, 1.0]), faulty) == pytest.approx((1 / 3 + 2 / 4) / 2)
    assert precision_at_faults(np.array([3.0, 0.0, 2.0, 1.0]), faulty) == 0


def typed(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text))


def test_a_word_is_taken_only_when_all_of_it_and_its_end_are_proposed():
    tokens = typed("x the thell .")  # the second word is two tokens
    perfect = np.append(tokens[1:], 0)
    assert saved_keys(tokens, perfect, TOKENIZER, 0) == (2 + 4, len("x the thell ."), 2, 2)
    too_long, too_short = perfect.copy(), perfect.copy()
    letters = tokens.tolist().index(TOKENIZER.encode("ll")[0])
    too_long[letters] = TOKENIZER.encode("s")[0]
    too_short[letters - 1] = TOKENIZER.encode(" the")[0]
    assert saved_keys(tokens, too_long, TOKENIZER, 0) == (2, len("x the thell ."), 1, 2)
    assert saved_keys(tokens, too_short, TOKENIZER, 0) == (2, len("x the thell ."), 1, 2)


def test_words_before_the_skip_are_not_counted():
    tokens = typed("x the the .")
    second = len(TOKENIZER.encode("x the"))
    saved, _, taken, words = saved_keys(tokens, np.append(tokens[1:], 0), TOKENIZER, second - 1)
    assert (saved, taken, words) == (2, 1, 1)


def test_without_history_every_window_begins_with_its_context_only(monkeypatch):
    monkeypatch.setattr(ev, "RESET_WINDOW", 16)
    monkeypatch.setattr(ev, "RESET_CONTEXT", 4)
    backend = NumpyBackend(segment=4)
    tokens = random_tokens(backend.config, 1, 40)[0]
    changed = tokens.copy()
    changed[:12] = (changed[:12] + 1) % backend.config.vocab_size
    assert (without_history(backend, tokens)[16:] == without_history(backend, changed)[16:]).all()
    assert (without_history(backend, tokens)[:12] != without_history(backend, changed)[:12]).any()
