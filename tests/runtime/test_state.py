"""Laws of the session state: bytes known before the first token, rows that own their arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import TINY, random_state

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import StateError
from fednl_runtime.state import MemoryState, check_state, state_bytes, state_shapes

SHIPPED_SHAPE = HopeConfig(vocab_size=4096)
EACH = pytest.mark.parametrize(
    "config",
    [
        TINY,
        SHIPPED_SHAPE,
        dataclasses.replace(TINY, layers=("delta",)),
        dataclasses.replace(TINY, cms_periods=()),
        dataclasses.replace(TINY, top_rank=0),
    ],
    ids=["tiny", "default", "delta", "no-cms", "no-top"],
)


def numbers_by_hand(c: HopeConfig) -> int:
    """Numbers in one session's state, written out from the documentation rather than the shapes."""
    h = c.d_model // c.n_head
    convolution = (c.d_conv - 1) * 4 * c.d_model
    linear_memory = c.n_head * h * h
    five_memories = 5 * c.n_head * (2 * h * c.d_memory) * 2  # running and boundary
    slow = len(c.cms_periods) * (2 * c.cms_rank * c.d_model + c.cms_rank**2)
    blocks = sum(convolution + slow + (linear_memory if p == "delta" else five_memories) for p in c.layers)
    pending = c.top_period * (c.d_model + c.top_rank + 1)
    return blocks + (c.top_rank * c.d_model + pending if c.top_rank else 0)


@EACH
def test_state_bytes_follow_from_the_configuration_alone(config):
    assert state_bytes(config) == 4 * numbers_by_hand(config)
    assert MemoryState.zeros(config, 3).nbytes == 3 * state_bytes(config)


def test_the_default_shape_costs_1_21_mebibytes_a_session():
    assert state_bytes(SHIPPED_SHAPE) == 1_265_728


def test_a_copy_shares_no_memory_with_its_source():
    state = random_state(batch=2)
    copy, row = state.copy(), state.row(1)
    for name in state.tensors:
        assert not np.shares_memory(state.tensors[name], copy.tensors[name])
        assert not np.shares_memory(state.tensors[name], row.tensors[name])
    assert not np.shares_memory(state.position, copy.position)


def test_stacked_rows_are_the_rows_again():
    state = random_state(batch=3, position=7)
    again = MemoryState.stack([state.row(i) for i in range(3)])
    np.testing.assert_array_equal(again.position, [7, 8, 9])
    for name, tensor in state.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], tensor)


def test_a_state_of_the_same_shapes_is_accepted():
    check_state(random_state(batch=2).tensors, state_shapes(TINY))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(TINY, layers=("delta",)), "unknown tensors"),
        (dataclasses.replace(TINY, layers=("delta",) * 2), "lacks 1.s"),
        (dataclasses.replace(TINY, top_rank=4), "this model needs"),
    ],
    ids=["fewer-layers", "other-profile", "other-rank"],
)
def test_a_state_of_another_model_is_refused(config, message):
    with pytest.raises(StateError, match=message):
        check_state(random_state().tensors, state_shapes(config))
