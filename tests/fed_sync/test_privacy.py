"""Central privacy adds the noise that it says, costs what the accountant says, and never lies about a robust rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
from updates import liars, members

from fednl_runtime.fed_sync.aggregate import Rule, norm
from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.privacy import CentralPrivacy

RNG = np.random.default_rng
Z4 = CentralPrivacy(4.0, max_epsilon=10.0)


def test_the_noise_has_the_promised_size_and_no_bias():
    group = members(3, size=20_000)
    exact = sum(m.delta for m in group) / 5
    noise = Z4.noised_mean(group, 1.0, goal=5, rng=RNG(1)) - exact
    assert abs(noise.std() / (4.0 * 1.0 / 5) - 1) < 0.02
    assert abs(noise.mean()) < 4 * 0.8 / math.sqrt(20_000)


def test_the_denominator_is_the_goal_whoever_comes():
    group = members(3)
    quiet = CentralPrivacy(1e-12, 1e30)
    three = quiet.noised_mean(group, 1.0, goal=5, rng=RNG(0))
    np.testing.assert_allclose(three, sum(m.delta for m in group) / 5, atol=1e-9)


def test_one_member_moves_the_sum_at_most_by_the_clip_norm():
    quiet = CentralPrivacy(1e-12, 1e30)
    without = quiet.noised_mean(members(4), 1.0, goal=4, rng=RNG(0))
    with_liar = quiet.noised_mean([*members(4), *liars(1)], 1.0, goal=4, rng=RNG(0))
    assert norm(with_liar - without) <= 1.0 / 4 + 1e-9


@pytest.mark.parametrize(
    ("z", "releases", "epsilon"), [(1, 1, 5.2), (1, 10, 20.6), (2, 10, 8.9), (4, 50, 10.1), (8, 50, 4.5)]
)
def test_epsilon_is_what_renyi_accounting_gives(z, releases, epsilon):
    assert abs(CentralPrivacy(z, 100.0).epsilon(releases) - epsilon) < 0.06


def test_epsilon_never_falls_and_ends_the_budget():
    spent = [Z4.epsilon(n) for n in (0, 1, 2, 10, 40, 60)]
    assert spent == sorted(spent)
    assert spent[0] == 0
    assert [Z4.affords(n) for n in (0, 1, 40, 60)] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["trimmed_mean", "median", "multi_krum"])
def test_a_robust_rule_with_privacy_is_refused_with_the_reason(kind):
    with pytest.raises(PolicyError, match="more than clip norm / goal"):
        Z4.require(Rule(kind, 1))
    Z4.require(Rule())


def test_noise_on_huge_clipped_members_stays_finite():
    assert np.isfinite(Z4.noised_mean(liars(3), 1.0, goal=3, rng=RNG(0))).all()


@pytest.mark.parametrize("options", [(0, 1, 1e-6), (1, 0, 1e-6), (1, 1, 0), (1, 1, 1), (math.inf, 1, 1e-6)])
def test_a_promise_without_meaning_is_refused(options):
    with pytest.raises(PolicyError):
        CentralPrivacy(*options)
