"""Contacts are spread, failures slow a device down and never speed it up, and the endpoint's word is bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.fed_sync.device.schedule import (
    LONGEST_S,
    Pace,
    delay_after_failure,
    delay_after_success,
    first_delay,
)

PACE = Pace()
TROUBLES = ("transient", "auth", "permanent")
random_numbers = st.integers().map(random.Random)


@given(rng=random_numbers, failures=st.integers(1, 10_000), trouble=st.sampled_from(TROUBLES))
def test_jitter_survives_the_cap(rng, failures, trouble):
    delays = [delay_after_failure(PACE, failures, trouble, None, rng) for _ in range(200)]
    floor = {"transient": 900, "auth": 3600, "permanent": 14400}[trouble]
    assert floor <= min(delays) < 1.2 * floor
    assert 1.8 * floor < max(delays) <= 2 * floor


@given(rng=random_numbers, interval=st.floats(1, 1e6), failures=st.integers(1, 50))
def test_a_failure_never_brings_a_device_back_sooner_than_a_success_would_up_to_the_cap(rng, interval, failures):
    pace = Pace(interval_s=interval)
    assert delay_after_failure(pace, failures, "transient", None, rng) >= min(interval, pace.cap_s)


def test_a_device_that_is_often_due_doubles_its_delay():
    pace, rng = Pace(interval_s=1, base_s=2, cap_s=900), random.Random(0)
    means = [sum(delay_after_failure(pace, n, "transient", None, rng) for _ in range(500)) / 500 for n in range(1, 6)]
    assert means == pytest.approx([3, 6, 12, 24, 48], rel=0.05)


def test_retry_after_is_honoured_spread_and_bounded():
    rng = random.Random(0)
    delays = [delay_after_failure(PACE, 1, "transient", 7200.0, rng) for _ in range(100)]
    assert 7200 <= min(delays) < max(delays) <= 14400
    assert delay_after_failure(PACE, 1, "transient", 1e30, rng) <= 2 * LONGEST_S


@given(rng=random_numbers, low=st.floats(allow_nan=False), high=st.floats(allow_nan=False))
def test_what_the_endpoint_asks_for_is_kept_within_a_week(rng, low, high):
    assert 0 <= delay_after_success(PACE, (low, high), rng) <= LONGEST_S


def test_the_endpoint_sets_the_pace_and_the_device_spreads_it():
    rng = random.Random(0)
    delays = [delay_after_success(PACE, (100, 300), rng) for _ in range(200)]
    assert 100 <= min(delays) < 110
    assert 290 < max(delays) <= 300
    assert 3600 <= delay_after_success(PACE, None, rng) <= 1.2 * 3600


def test_a_fleet_switched_on_at_once_comes_over_a_quarter_of_an_hour():
    rng = random.Random(0)
    delays = [first_delay(PACE, rng) for _ in range(500)]
    assert min(delays) < 10
    assert 880 < max(delays) <= 900
