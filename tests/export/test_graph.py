"""The exported graph equals the law: any split, any length of a call, every profile, fused and portable."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import onnx
import pytest
from models import TINY, random_params, random_state, random_tokens

from fednl_runtime import reference
from fednl_runtime.export.graph import build_model, export_model
from fednl_runtime.export.ops import Ops
from fednl_runtime.onnx_backend import load
from fednl_runtime.state import MemoryState

BASE = dataclasses.replace(TINY, d_model=10, cms_periods=(4, 12), top_period=8, memory_period=4)
CONFIGS = {
    "both profiles": BASE,
    "delta": dataclasses.replace(BASE, layers=("delta",)),
    "self-modifying": dataclasses.replace(BASE, layers=("self_modifying",), error_clip=0.5, eta_max=0.7),
    "one level": dataclasses.replace(BASE, cms_periods=(4,), memory_period=12),
    "no levels": dataclasses.replace(BASE, cms_periods=(), top_rank=0),
    "nothing slow": dataclasses.replace(BASE, layers=("delta",), cms_periods=(), top_rank=0, memory_period=4),
}
ADAPTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5))


def params_of(config, seed=0):
    """Random parameters that are exact in fp32, float64."""
    return {n: v.astype(np.float32).astype(np.float64) for n, v in random_params(config, seed).items()}


def backend_of(config, folder, portable=False):
    export_model(params_of(config), config, "{}", folder / "model.onnx", Ops(portable))
    return load(folder / "model.onnx", threads=1)


def feed_all(backend, state, tokens, adapt, cuts):
    stream = backend.open(state)
    parts = np.split(tokens, np.cumsum(cuts)[:-1], 1)
    return np.concatenate([stream.feed(part, adapt).copy() for part in parts], 1), stream.snapshot()


def assert_close(found, wanted, bound=1e-4):
    np.testing.assert_allclose(found[0], wanted[0], rtol=bound, atol=bound)
    for name, tensor in found[1].tensors.items():
        np.testing.assert_allclose(tensor, wanted[1].tensors[name], rtol=bound, atol=bound, err_msg=name)
    assert np.array_equal(found[1].position, wanted[1].position)


def start(config, positions):
    """A state with no zeros whose rows stand at `positions`; exact in fp32."""
    state = random_state(config, len(positions))
    tensors = {n: t.astype(np.float32).astype(np.float64) for n, t in state.tensors.items()}
    return MemoryState(tensors, np.array(positions))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_at_different_positions_equal_the_law_across_boundaries(config, portable, tmp_path):
    state, tokens = start(config, (7, 11, 23)), random_tokens(config, 3, 14)
    found = feed_all(backend_of(config, tmp_path, portable), state, tokens, reference.ADAPT, [1, 2, 2, 1, 3, 1, 3, 1])
    assert_close(found, reference.run(params_of(config), config, tokens, state))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("adapt", ADAPTS)
def test_every_adapt_setting_equals_the_law(adapt, portable, tmp_path):
    state, tokens = start(BASE, (3, 23, 0)), random_tokens(BASE, 3, 6)
    adapt = np.array([adapt, (1, 1), adapt], np.float32)
    found = feed_all(backend_of(BASE, tmp_path, portable), state, tokens, adapt, [1, 3, 1, 1])
    assert_close(found, reference.run(params_of(BASE), BASE, tokens, state, adapt))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("length", range(1, 9))
def test_no_length_of_a_call_is_baked_into_the_graph(length, portable, tmp_path):
    config = dataclasses.replace(BASE, cms_periods=(8, 24), memory_period=8)
    state, tokens = start(config, (16,)), random_tokens(config, 1, 10)
    cuts = [n for n in (length, 8 - length, 2) if n]
    found = feed_all(backend_of(config, tmp_path, portable), state, tokens, reference.ADAPT, cuts)
    assert_close(found, reference.run(params_of(config), config, tokens, state))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("adapt", "still"), [((0, 1), r"\d\.(s|w1|w2)"), ((1, 0), r"\d\.cms_|top\.f")])
def test_at_adapt_0_the_fast_weights_concerned_stay_bit_identical(adapt, still, portable, tmp_path):
    state, tokens = start(BASE, (3, 22)), random_tokens(BASE, 2, 12)
    cuts = [1, 1, 3, 1, 3, 1, 2]
    _, last = feed_all(backend_of(BASE, tmp_path, portable), state, tokens, np.array([adapt] * 2, np.float32), cuts)
    names = [n for n in state.tensors if re.match(still, n)]
    assert len(names) >= 4
    assert [n for n in names if not np.array_equal(last.tensors[n], state.tensors[n].astype(np.float32))] == []


def test_the_fused_graph_is_the_same_for_any_split_within_rounding(tmp_path):
    backend = backend_of(BASE, tmp_path)
    state, tokens = start(BASE, (4,)), random_tokens(BASE, 1, 12)
    one = feed_all(backend, state, tokens, reference.ADAPT, [1] * 12)
    assert_close(feed_all(backend, state, tokens, reference.ADAPT, [4, 4, 4]), one, 2e-6)
    assert_close(feed_all(backend, state, tokens, reference.ADAPT, [3, 1, 1, 2, 1, 4]), one, 2e-6)


def test_a_portable_graph_has_standard_operators_only():
    model = build_model(params_of(BASE), BASE, Ops(portable=True))
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize(("profile", "most"), [("delta", 55), ("self_modifying", 141)])
def test_a_layer_needs_few_nodes(profile, most):
    one, two = (dataclasses.replace(BASE, layers=(profile,) * n) for n in (1, 2))
    counts = []
    for config in (one, two):
        nodes = build_model(params_of(config), config, Ops(portable=False)).graph.node
        counts.append(sum(node.op_type != "Cast" for node in nodes))  # casts of weights are folded at load
    assert counts[1] - counts[0] <= most


def test_a_segment_divides_every_period():
    assert BASE.segment == 4
    assert dataclasses.replace(CONFIGS["nothing slow"], memory_period=5).segment == 5


def test_boundary_work_sits_in_branches():
    model = build_model(params_of(BASE), BASE, Ops(portable=False))
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("If") == 2
    assert not {"Softmax", "Scan", "Loop"} & set(operators)
