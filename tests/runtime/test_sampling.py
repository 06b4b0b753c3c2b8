"""Laws of sampling: greedy is the maximum, the same seed is the same token, limits are limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fednl_runtime.errors import RequestError
from fednl_runtime.sampling import (
    FIRST_TRIED,
    SamplingParams,
    adjust,
    likeliest,
    log_softmax,
    sample,
    top_logprobs,
    truncate,
)

LOGITS = arrays(np.float32, st.integers(1, 13), elements=st.floats(-30, 30, width=32, allow_subnormal=False))
WHOLE = st.floats(0, 1, allow_subnormal=False)
LADDER = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


@given(LOGITS)
def test_temperature_zero_is_the_largest_logit(logits: np.ndarray) -> None:
    assert sample(logits, SamplingParams(temperature=0), np.random.default_rng(0), ()) == int(logits.argmax())


@given(LOGITS, st.integers(0, 5), st.floats(0.01, 1), WHOLE, st.floats(1e-300, 2))
def test_some_token_with_weight_is_always_chosen(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p)
    assert 0 <= sample(logits, params, np.random.default_rng(1), ()) < len(logits)


def test_the_same_seed_chooses_the_same_tokens_and_choices_differ() -> None:
    params = SamplingParams(seed=3)
    logits = np.zeros(50, np.float32)

    def draws(choice: int) -> list[int]:
        rng = params.rng(choice)
        return [sample(logits, params, rng, ()) for _ in range(10)]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert SamplingParams(seed=-3).rng().random() == SamplingParams(seed=-3).rng().random()


def test_frequencies_follow_the_probabilities() -> None:
    rng, params = np.random.default_rng(0), SamplingParams()
    counts = np.bincount([sample(LADDER, params, rng, ()) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, np.exp(LADDER), atol=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {1, 3}),
        (SamplingParams(top_p=0.4), {1}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(min_p=0.5), {1, 2, 3}),
        (SamplingParams(top_k=3, top_p=0.6, min_p=0.1), {1, 3}),
        (SamplingParams(), {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_the_likeliest_tokens(params: SamplingParams, kept: set[int]) -> None:
    weights = np.array([0.1, 0.4, 0.2, 0.3])
    assert set(np.flatnonzero(truncate(weights, params)).tolist()) == kept


def test_repetition_penalty_lowers_seen_tokens_of_either_sign() -> None:
    scores = adjust(np.array([2.0, -2.0, 1.0], np.float32), SamplingParams(repetition_penalty=2), {0, 1})
    assert scores.tolist() == [1, -4, 1]


def test_logit_bias_is_added_to_its_tokens() -> None:
    params = SamplingParams(temperature=0, logit_bias=((2, 100.0),))
    assert sample(np.array([5.0, 3.0, -5.0], np.float32), params, np.random.default_rng(0), ()) == 2


@given(LOGITS)
def test_log_softmax_is_normalised_and_ranks_like_the_logits(logits: np.ndarray) -> None:
    logprobs = log_softmax(logits)
    assert np.exp(logprobs).sum() == pytest.approx(1, rel=1e-4)
    best = top_logprobs(logprobs, 3)
    assert [p for _, p in best] == sorted((float(p) for p in logprobs), reverse=True)[:3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (-0.1, 2.1, 999999.0, float("nan"), float("inf"))),
        *(("top_p", v) for v in (-1.0, 0.0, 1.1, float("nan"))),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", ("a",) * 9),
        ("stop", ("a" * 257,)),
        ("logit_bias", ((0, 101.0),)),
        ("logit_bias", ((0, float("nan")),)),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@given(arrays(np.float32, st.integers(1, 40), elements=st.integers(-3, 3)), st.integers(0, 45))
def test_the_likeliest_are_those_of_a_stable_sort(scores: np.ndarray, num: int) -> None:
    assert likeliest(scores, num).tolist() == np.argsort(-scores, kind="stable")[:num].tolist()


@given(st.integers(0, 2**31), st.floats(0.01, 0.99), WHOLE, st.floats(0.1, 30))
def test_truncation_of_a_large_vocabulary_keeps_what_a_full_sort_keeps(
    seed: int, top_p: float, min_p: float, spread: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=FIRST_TRIED[-1] + 101) * spread
    weights = np.exp(logits - logits.max())
    kept = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[kept])
    kept = kept[: 1 + int(np.searchsorted(mass, top_p * mass[-1]))]
    expected = set(kept[weights[kept] >= min_p * weights[kept[0]]].tolist())
    found = set(np.flatnonzero(truncate(weights, SamplingParams(top_p=top_p, min_p=min_p))).tolist())
    assert len(found ^ expected) <= 1  # the one at which a sum that is rounded otherwise ends


def test_a_draw_takes_the_token_at_which_the_summed_weights_pass_the_number_drawn() -> None:
    logits = np.random.default_rng(2).normal(size=997).astype(np.float32)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.7)
    drawn, chosen = np.random.default_rng(5), np.random.default_rng(5)
    params = SamplingParams(temperature=0.7)
    expected = [int(drawn.choice(997, p=weights / weights.sum())) for _ in range(200)]
    assert [sample(logits, params, chosen, ()) for _ in range(200)] == expected
