"""Laws of slots: whoever comes, goes or runs beside a turn, its row holds its memory."""

from __future__ import annotations

import numpy as np
import pytest
from engines import CONFIG, NumpyBackend, write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from fednl_runtime.backend import FREEZE, LEARN
from fednl_runtime.onnx_backend import load
from fednl_runtime.reference import run
from fednl_runtime.slots import Feed, Slots, sizes
from fednl_runtime.state import MemoryState

ADAPTS = (LEARN, FREEZE)


def same(a: MemoryState, b: MemoryState) -> bool:
    return np.array_equal(a.position, b.position) and all(np.array_equal(t, b.tensors[n]) for n, t in a.tensors.items())


@given(st.lists(st.integers(0, 2**16), min_size=1, max_size=25))
@settings(deadline=None, max_examples=30)
def test_any_coming_going_and_batching_leaves_every_turn_what_it_read(choices):
    backend = NumpyBackend()
    slots, turns = Slots(backend, 4), {}
    for choice in choices:
        rng = np.random.default_rng(choice)
        if len(turns) < 4 and (not turns or rng.random() < 0.4):
            adapt = ADAPTS[choice % 2]
            slot = slots.open(MemoryState.zeros(CONFIG), adapt)
            turns[slot] = MemoryState.zeros(CONFIG), adapt
        elif rng.random() < 0.2:
            slot = list(turns)[choice % len(turns)]
            slot.close()
            del turns[slot]
        else:
            chosen = [list(turns)[i] for i in rng.permutation(len(turns))[: 1 + choice % len(turns)]]
            tokens = rng.integers(0, CONFIG.vocab_size, (len(chosen), 1))
            logits = slots.read([Feed(slot, tuple(row)) for slot, row in zip(chosen, tokens, strict=True)])
            for slot, row, found in zip(chosen, tokens, logits, strict=True):
                state, adapt = turns[slot]
                wanted, state = run(backend.params, CONFIG, row[None], state, np.array([adapt], np.float32))
                np.testing.assert_array_equal(found, wanted[0].astype(np.float32))
                turns[slot] = state, adapt
        assert all(same(slot.snapshot(), state) for slot, (state, _) in turns.items())


def test_a_slot_is_freed_once_however_often_it_is_closed():
    slots = Slots(NumpyBackend(), 2)
    first, second = slots.open(MemoryState.zeros(CONFIG), LEARN), slots.open(MemoryState.zeros(CONFIG), LEARN)
    slots.read([Feed(second, (3,))])
    first.close()
    first.close()
    third = slots.open(MemoryState.zeros(CONFIG), LEARN)
    assert {second.row, third.row} == {0, 1}
    assert (second.snapshot().position[0], third.snapshot().position[0]) == (1, 0)


def test_calibration_takes_the_smallest_batch_that_is_about_as_fast_as_any(monkeypatch):
    seconds = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.5}
    slots = Slots(NumpyBackend(), 8)
    monkeypatch.setattr(Slots, "_seconds", lambda self, feeds: seconds[len(feeds)])
    slots.calibrate()
    assert slots.batch == 4


@pytest.mark.parametrize(("capacity", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_batch_sizes_double_up_to_the_capacity(capacity, expected):
    assert sizes(capacity) == expected


def test_rows_on_onnxruntime_hold_their_memories_in_calls_of_any_rows_and_lengths(tmp_path):
    backend = load(write_tiny_model(tmp_path / "tiny.onnx"), threads=1)
    rng = np.random.default_rng(0)
    slots = Slots(backend, 3)
    turns = [(slots.open(MemoryState.zeros(backend.config), LEARN), backend.open(MemoryState.zeros(backend.config)))]
    for step in range(120):
        if len(turns) < 3 and step % 7 == 0:
            turns.append((slots.open(turns[0][1].snapshot(), LEARN), backend.open(turns[0][1].snapshot())))
        if step % 40 == 39:
            turns.pop(0)[0].close()
        chosen = [turns[i] for i in rng.permutation(len(turns))[: 1 + step % len(turns)]]
        room = backend.segment - max(int(alone.snapshot().position[0]) % backend.segment for _, alone in chosen)
        length = int(rng.integers(1, room + 1)) if len(chosen) == 1 else 1
        tokens = rng.integers(0, backend.config.vocab_size, (len(chosen), length))
        logits = slots.read([Feed(slot, tuple(row)) for (slot, _), row in zip(chosen, tokens, strict=True)]).copy()
        for (_, alone), row, found in zip(chosen, tokens, logits, strict=True):
            wanted = alone.feed(row[None], np.array([LEARN], np.float32))[0]
            np.testing.assert_allclose(found, wanted, atol=1e-4)
    for slot, alone in turns:
        for name, tensor in alone.snapshot().tensors.items():
            np.testing.assert_allclose(slot.snapshot().tensors[name], tensor, atol=1e-4)
