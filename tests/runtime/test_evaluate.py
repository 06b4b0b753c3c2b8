"""Laws of `eval`: each arm is the literal stream it is described as."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from engines import CONFIG, NumpyBackend
from models import random_tokens

from fednl_runtime import evaluate as ev
from fednl_runtime.reference import run
from fednl_runtime.state import MemoryState

CALM = dataclasses.replace(CONFIG, eta_max=0.2)
"""Random memories with full steps multiply any rounding."""

LENGTHS = [1, 63, 100]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch, request):
    """Windows that a slow reference can cross a few times."""
    if "documented" not in request.node.name:
        for name, value in {"RESET_WINDOW": 32, "RESET_CONTEXT": 8, "FREEZE_AFTER": 24, "BIN": 16}.items():
            monkeypatch.setattr(ev, name, value)


def backend() -> NumpyBackend:
    """The reference, with calls that end where a window does."""
    return NumpyBackend(CALM, segment=8)


def text_of(length: int) -> np.ndarray:
    """Random tokens for `length` predictions."""
    return random_tokens(CONFIG, 1, length + 1)[0]


def literal(tokens: np.ndarray, frozen_after: int | None = None) -> np.ndarray:
    """Surprise of every token but the first, read one after another from an empty memory."""
    state, scores = MemoryState.zeros(CALM), []
    params = backend().params
    for t, (token, target) in enumerate(itertools.pairwise(tokens)):
        learns = frozen_after is None or t < frozen_after
        adapt = np.array([[1, 1 if learns else 0]], np.float32)
        logits, state = run(params, CALM, np.array([[token]]), state, adapt)
        p = np.exp(logits[0, 0].astype(float))
        scores.append(-np.log(p[target] / p.sum()))
    return np.array(scores)


def literal_reset(tokens: np.ndarray) -> np.ndarray:
    """The same, but every 32 tokens the memory is cleared and the 8 before are read again, unscored."""
    scores = []
    for start in range(0, len(tokens) - 1, 32):
        context = max(0, start - 8)
        scores.append(literal(tokens[context : start + 33])[start - context :])
    return np.concatenate(scores)


@pytest.mark.parametrize("length", LENGTHS)
def test_on_is_the_literal_stream_and_frozen_stops_the_slow_levels(length):
    tokens = text_of(length)
    on, frozen = ev.carried(backend(), tokens, lambda n: None)
    np.testing.assert_allclose(on, literal(tokens), **CLOSE)
    np.testing.assert_allclose(frozen, literal(tokens, frozen_after=24), **CLOSE)
    assert (np.abs(on - frozen).max() > 1e-3) == (length > 24)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_reset_clears_the_memory_and_reads_the_context_again_unscored(length, batch):
    tokens = text_of(length)
    scores = ev.cut_short(backend(), tokens, batch, lambda n: None)
    np.testing.assert_allclose(scores, literal_reset(tokens), **CLOSE)


def test_the_documented_windows_are_512_tokens_with_128_of_context():
    assert list(ev.windows(1300)) == [(0, 0, 512), (384, 512, 1024), (896, 1024, 1300)]
    assert list(ev.windows(512)) == [(0, 0, 512)]
    assert (ev.FREEZE_AFTER, ev.BIN) == (512, 1024)


@pytest.mark.parametrize("length", LENGTHS)
def test_all_arms_read_the_work_that_the_progress_bar_expects(length):
    read: list[int] = []
    arms = ev.evaluate(backend(), text_of(length), 7, read.append)
    assert sum(read) == ev.work(length)
    assert tuple(arms) == ev.ARMS
    assert [len(arm.bins) for arm in arms.values()] == [math.ceil(length / 16)] * 3


def test_a_summary_has_averages_bits_a_byte_and_bins():
    scores = np.arange(20.0)
    arm = ev.summarise(scores, num_bytes=38)
    assert arm.nats_per_token == 9.5
    assert arm.bits_per_byte == pytest.approx(190 / math.log(2) / 38, rel=1e-15)
    assert arm.bins == [7.5, 17.5]
    assert json.dumps(arm.bins)


def test_surprise_is_minus_log_p_even_of_large_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 9, 5))
    targets = rng.integers(0, 5, (2, 9))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0])
    for shift in (0, 1e4, -1e4):
        np.testing.assert_allclose(ev.surprise(logits + shift, targets), expected, rtol=0, atol=1e-9)


def test_the_mean_difference_averages_over_files_in_percent():
    def arms(on: float, reset: float) -> dict[str, ev.Arm]:
        return {name: ev.Arm(nats, 1.0, []) for name, nats in (("on", on), ("reset", reset))}

    assert ev.mean_difference([arms(1.8, 2.0), arms(1.0, 1.0)], "reset") == pytest.approx(-5)
