"""Streams on onnxruntime: state in, state out, nothing shared, nothing allocated by a token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import TINY, random_params, random_state, random_tokens

from fednl_runtime import onnx_backend, reference
from fednl_runtime.errors import ModelFileError, StateError
from fednl_runtime.export.graph import export_model
from fednl_runtime.onnx_backend import default_threads, load
from fednl_runtime.state import MemoryState

CONFIG = dataclasses.replace(TINY, d_model=10, cms_periods=(4, 12), top_period=8, memory_period=4)


def single(params):
    return {n: np.asarray(v, np.float32).astype(np.float64) for n, v in params.items()}


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    export_model(random_params(CONFIG), CONFIG, "{}", path)
    return load(path, threads=1)


def same(a, b):
    return all(np.array_equal(a.tensors[n], b.tensors[n]) for n in a.tensors) and np.array_equal(a.position, b.position)


def test_opening_and_feeding_leave_the_given_state_alone(backend):
    state = random_state(CONFIG, 2, position=3)
    before = state.copy()
    backend.open(state).feed(random_tokens(CONFIG, 2, 1)[:, :1] * 0, reference.ADAPT)
    assert same(state, before)


def test_a_snapshot_owns_its_memory(backend):
    stream = backend.open(random_state(CONFIG, 1))
    snapshot = stream.snapshot()
    before = snapshot.copy()
    stream.feed(random_tokens(CONFIG, 1, 4), reference.ADAPT)
    assert same(snapshot, before)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_snapshot_continues_bit_for_bit(stop, backend):
    tokens = random_tokens(CONFIG, 1, 12)
    stream = backend.open(random_state(CONFIG, 1))
    for t in range(stop):
        stream.feed(tokens[:, t : t + 1], reference.ADAPT)
    again = backend.open(stream.snapshot())
    for t in range(stop, 12):
        step = tokens[:, t : t + 1]
        assert np.array_equal(stream.feed(step, reference.ADAPT), again.feed(step, reference.ADAPT))
    assert same(stream.snapshot(), again.snapshot())


def test_a_row_is_the_same_alone_and_in_a_batch(backend):
    state, tokens = random_state(CONFIG, 3, position=5), random_tokens(CONFIG, 3, 6)
    whole, alone = backend.open(state), backend.open(state.row(1))
    for t in range(6):
        logits = whole.feed(tokens[:, t : t + 1], reference.ADAPT)
        np.testing.assert_allclose(alone.feed(tokens[1:2, t : t + 1], reference.ADAPT), logits[1:2], atol=1e-5)


def test_streams_of_one_backend_do_not_touch_each_other(backend):
    tokens = random_tokens(CONFIG, 1, 8)
    expected = backend.open(random_state(CONFIG, 1))
    a, b = backend.open(random_state(CONFIG, 1)), backend.open(random_state(CONFIG, 1, seed=9))
    for t in range(8):
        wanted = expected.feed(tokens[:, t : t + 1], reference.ADAPT).copy()
        b.feed(tokens[:, 7 - t : 8 - t], reference.ADAPT)
        assert np.array_equal(a.feed(tokens[:, t : t + 1], reference.ADAPT), wanted)


def test_a_call_across_a_segment_is_our_own_mistake(backend):
    with pytest.raises(AssertionError):
        backend.open(random_state(CONFIG, 2, position=2)).feed(random_tokens(CONFIG, 2, 2), reference.ADAPT)


def test_many_tokens_allocate_no_new_bindings(backend):
    stream = backend.open(MemoryState.zeros(CONFIG))
    for t in range(40):
        stream.feed(np.array([[t % 11]]), reference.ADAPT)
    assert len(stream._bindings) == 2


def test_stored_rules_are_the_default(backend):
    params = random_params(CONFIG)
    own = {"rule.0.b_eta": params["layers.0.b_eta"], "rule.top.p": params["top.p"]}
    state, tokens = random_state(CONFIG, 1), random_tokens(CONFIG, 1, 4)
    replaced = backend.with_rules(own).open(state).feed(tokens, reference.ADAPT)
    assert np.array_equal(replaced, backend.open(state).feed(tokens, reference.ADAPT))


def test_new_rules_equal_the_law_with_those_rules(backend):
    other = random_params(CONFIG, seed=5)
    params = dict(random_params(CONFIG))
    rules = {}
    for name in backend.model.rules:
        own = name.replace("rule.", "" if ".top." in name else "layers.")
        rules[name] = params[own] = other[own]
    state, tokens = random_state(CONFIG, 1, position=8), random_tokens(CONFIG, 1, 9)
    stream = backend.with_rules(rules).open(state)
    logits = [stream.feed(tokens[:, t : t + 1], reference.ADAPT).copy() for t in range(9)]
    expected, _ = reference.run(single(params), CONFIG, tokens, state)
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rule.0.b_eta", np.zeros(3)),
        ("rule.7.b_eta", np.zeros(2)),
        ("norm", np.zeros(10)),
        ("rule.0.b_eta", np.array([0, np.nan])),
    ],
)
def test_rules_of_another_model_are_refused(name, value, backend):
    with pytest.raises(ModelFileError, match="rules"):
        backend.with_rules({name: value})


def test_a_state_of_another_model_is_refused(backend):
    with pytest.raises(StateError):
        backend.open(MemoryState.zeros(TINY))


def test_a_state_whose_rows_differ_in_number_is_refused(backend):
    state = MemoryState.zeros(CONFIG, 2)
    with pytest.raises(StateError, match="rows"):
        backend.open(MemoryState(state.tensors, state.position[:1]))


@pytest.mark.parametrize(
    ("text", "limit"), [("150000 100000", 1), ("max 100000", None), ("50000 100000", 1), ("", None)]
)
def test_threads_follow_the_quota_of_the_container(text, limit, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(onnx_backend, "CGROUP_QUOTA", tmp_path / "missing")
    cores = default_threads()
    monkeypatch.setattr(onnx_backend, "CGROUP_QUOTA", tmp_path / "cpu.max")
    assert default_threads() == (limit or cores)
