"""The server's optimisers follow their papers, stay finite, and the gate lets no wild step through."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.optimize import KINDS, ServerOptimizer, gate

DELTAS = np.random.default_rng(0).standard_normal((3, 5))


def steps(optimizer: ServerOptimizer, deltas: np.ndarray) -> list[np.ndarray]:
    state, found = {}, []
    for delta in deltas:
        step, state = optimizer.step(delta, state)
        found.append(step)
    return found


def test_without_an_optimiser_the_step_is_the_difference():
    np.testing.assert_array_equal(steps(ServerOptimizer(lr=0.5), DELTAS), 0.5 * DELTAS)


def test_momentum_sums_the_past_with_falling_weight():
    a, b, c = DELTAS
    last = steps(ServerOptimizer("momentum", lr=2.0, beta1=0.9), DELTAS)[-1]
    np.testing.assert_allclose(last, 2.0 * (c + 0.9 * b + 0.81 * a), rtol=1e-14)


def test_adam_is_algorithm_2_of_reddi_et_al():
    a, b, _ = DELTAS
    m = 0.9 * (0.1 * a) + 0.1 * b
    v = 0.99 * (0.01 * a**2) + 0.01 * b**2
    step = steps(ServerOptimizer("adam", lr=0.1), DELTAS[:2])[-1]
    np.testing.assert_allclose(step, 0.1 * m / (np.sqrt(v) + 1e-3), rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-200, 1e30])
def test_a_thousand_rounds_stay_finite(kind, size):
    assert np.isfinite(steps(ServerOptimizer(kind), np.full((1000, 2), size))).all()


@pytest.mark.parametrize(
    "options",
    [{"kind": "yogi"}, {"lr": 0}, {"lr": math.nan}, {"lr": math.inf}, {"tau": 0}, {"beta1": 1.0}, {"beta2": -0.1}],
)
def test_an_optimiser_that_cannot_work_is_refused(options):
    with pytest.raises(PolicyError):
        ServerOptimizer(**options)


def test_the_gate_stops_what_is_not_finite_or_too_far():
    before = np.zeros(4)
    assert gate(before, np.full(4, 0.5), 1.0) is None
    assert "norm 2" in str(gate(before, np.ones(4), 1.0))
    assert "not finite" in str(gate(before, np.array([0, np.nan, 0, 0]), 1.0))
    assert "not finite" in str(gate(before, np.array([0, np.inf, 0, 0]), math.inf))
