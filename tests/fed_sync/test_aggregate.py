"""Aggregation is exact, blind to order, bounded against liars, and refuses rounds that are too small."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updates import liars, members

from fednl_runtime.fed_sync.aggregate import KINDS, Member, Rule, aggregate, capped, clip, norm
from fednl_runtime.fed_sync.errors import PolicyError, RoundError

C = 1.0
RULES = [Rule(), Rule("trimmed_mean", 2), Rule("median", 2), Rule("multi_krum", 2)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_the_order_of_arrival_changes_no_bit(rule):
    group = [dataclasses.replace(m, num_tokens=7 * i + 1, staleness=i % 3) for i, m in enumerate(members(9))]
    wanted = aggregate(group, rule, C).tobytes()
    for seed in range(5):
        assert aggregate(random.Random(seed).sample(group, 9), rule, C).tobytes() == wanted


def test_the_mean_weighs_by_tokens_up_to_the_cap():
    group = [
        dataclasses.replace(m, num_tokens=tokens) for m, tokens in zip(members(4), (10, 20, 30, 10**12), strict=True)
    ]
    expected = np.average([m.delta for m in group], axis=0, weights=[10, 20, 30, 40])
    np.testing.assert_allclose(aggregate(group, Rule(weight_cap=2), C), expected, atol=1e-15)


def test_a_stale_update_counts_one_over_the_root_of_one_plus_its_staleness():
    (fresh,) = members(1)
    stale = dataclasses.replace(fresh, staleness=3)
    np.testing.assert_allclose(aggregate([stale], Rule(), C), fresh.delta / 2, atol=1e-15)


@pytest.mark.parametrize("n", [5, 6])
def test_the_median_is_numpys(n):
    group = members(n)
    expected = np.median([m.delta for m in group], axis=0)
    np.testing.assert_allclose(aggregate(group, Rule("median"), C), expected, atol=1e-15)


def test_the_trimmed_mean_leaves_out_the_extremes():
    group = members(7)
    expected = np.sort([m.delta for m in group], axis=0)[2:-2].mean(axis=0)
    np.testing.assert_allclose(aggregate(group, Rule("trimmed_mean", 2), C), expected, atol=1e-15)


def test_multi_krum_is_the_mean_of_the_closest_and_leaves_out_the_liars():
    group = members(7)
    chosen = aggregate([*group, *liars(2)], Rule("multi_krum", 2), C)
    scores = [sorted(norm(a.delta - b.delta) ** 2 for b in group if b is not a)[:5] for a in group]
    best = np.argsort([math.fsum(s) for s in scores])[:5]
    np.testing.assert_allclose(chosen, np.mean([group[i].delta for i in best], axis=0), atol=1e-15)


@pytest.mark.parametrize(("kind", "least"), [("mean", 1), ("trimmed_mean", 5), ("median", 5), ("multi_krum", 7)])
def test_a_rule_refuses_a_round_that_is_too_small(kind, least):
    rule = Rule(kind, 2)
    assert rule.least == least
    aggregate(members(least), rule, C)
    with pytest.raises(RoundError, match=f"needs {least}"):
        aggregate(members(least)[1:], rule, C)


@pytest.mark.parametrize("kind", ["trimmed_mean", "median"])
@given(f=st.integers(1, 3), seed=st.integers(0, 99), value=st.sampled_from([-1e30, 1e30, -0.5, 0.0, 1e-9]))
def test_coordinate_rules_stay_between_honest_numbers(kind, f, seed, value):
    honest = members(f + 1 + seed % 3, seed)
    result = aggregate([*honest, *liars(f, value=value)], Rule(kind, f), C)
    deltas = np.array([clip(m.delta, C) for m in honest])
    assert (result >= deltas.min(axis=0) - 1e-12).all()
    assert (result <= deltas.max(axis=0) + 1e-12).all()


@given(
    f=st.integers(0, 4),
    n=st.integers(1, 12),
    seed=st.integers(0, 99),
    tokens=st.lists(st.integers(1, 10**6), min_size=16, max_size=16),
)
def test_liars_move_the_mean_at_most_by_their_capped_share(f, n, seed, tokens):
    f = min(f, n - 1)
    honest = [dataclasses.replace(m, num_tokens=t) for m, t in zip(members(n - f, seed), tokens, strict=False)]
    group = [*honest, *liars(f, value=(-1e30, 1e30)[seed % 2])]
    rule = Rule()
    weights = capped([m.num_tokens for m in group], rule.weight_cap)
    others = np.average([clip(m.delta, C) for m in honest], axis=0, weights=weights[: n - f])
    if f <= n // 2:
        c = rule.weight_cap
        share = f * c / (f * c + n // 2 + 1 - f)
        assert norm(aggregate(group, rule, C) - others) <= 2 * C * share + 1e-12


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_no_round_is_longer_than_its_bound(rule):
    group = [Member(f"{i}", 10.0**i * m.delta, 100) for i, m in enumerate(members(9))]
    bound = C * math.sqrt(9) if rule.kind in ("median", "trimmed_mean") else C
    assert norm(aggregate(group, rule, C)) <= bound * (1 + 1e-12)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_clipping_keeps_direction_and_never_exceeds_the_limit(numbers, limit):
    vector = np.array(numbers)
    clipped = clip(vector, limit)
    assert norm(clipped) <= limit * (1 + 1e-12)
    if norm(vector) <= limit:
        assert (clipped == vector).all()
    else:
        np.testing.assert_allclose(clipped / limit, vector / norm(vector), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "faulty", "cap"),
    [
        ("krum", 0, 2),
        ("trimmed_mean", 0, 2),
        ("multi_krum", 0, 2),
        ("mean", -1, 2),
        ("mean", 0, 0.5),
        ("mean", 0, math.nan),
    ],
)
def test_a_rule_that_cannot_work_is_refused(kind, faulty, cap):
    with pytest.raises(PolicyError):
        Rule(kind, faulty, cap)


def test_all_rules_are_tried_here():
    assert tuple(rule.kind for rule in RULES) == KINDS
