"""Laws of the guard: broken memories are refused by name, healthy ones measured."""

from __future__ import annotations

import numpy as np
import pytest
from models import TINY, random_state

from fednl_runtime.errors import MemoryBreachError
from fednl_runtime.guard import NormCaps, check_memory, level, update_norm
from fednl_runtime.state import MemoryState, state_shapes

NAMES = sorted(state_shapes(TINY))


def test_every_fast_weight_belongs_to_a_level() -> None:
    assert {name: level(name) for name in NAMES if level(name)} == {
        "0.s": "token",
        "1.w1": "token",
        "1.w2": "token",
        "1.w1_boundary": "token",
        "1.w2_boundary": "token",
        "0.cms_f": "cms",
        "1.cms_f": "cms",
        "top.f": "top",
    }


def test_a_fresh_and_an_ordinary_memory_pass() -> None:
    check_memory(MemoryState.zeros(TINY), NormCaps())
    check_memory(random_state(), NormCaps())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_a_breach(name: str, value: float) -> None:
    state = random_state()
    state.tensors[name].flat[-1] = value
    with pytest.raises(MemoryBreachError, match=f"left {name} not finite"):
        check_memory(state, NormCaps())


@pytest.mark.parametrize(("name", "kind"), [("0.s", "token"), ("1.w2", "token"), ("1.cms_f", "cms"), ("top.f", "top")])
def test_a_fast_weight_beyond_the_cap_of_its_level_is_a_breach(name: str, kind: str) -> None:
    state = random_state()
    alone = MemoryState({name: state.tensors[name]}, state.position)
    norm = float(np.linalg.norm(state.tensors[name]))
    check_memory(alone, NormCaps(**{kind: norm * 1.01}))
    with pytest.raises(MemoryBreachError, match=f"left {name} at norm"):
        check_memory(alone, NormCaps(**{kind: norm * 0.99}))


def test_the_update_norm_measures_slow_memories_only() -> None:
    before = MemoryState.zeros(TINY)
    after = before.copy()
    after.tensors["0.s"] += 5
    after.tensors["top.h"] += 5
    assert update_norm(before, after) == 0
    after.tensors["top.f"].flat[0] = 3
    after.tensors["1.cms_f"].flat[0] = 4
    assert update_norm(before, after) == 5
