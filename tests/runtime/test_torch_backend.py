"""Laws of the torch backend: the NumPy law, the protocol of streams, and memories that move between backends."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import TOKENIZER, tiny_tokenizer_json
from models import TINY, random_params, random_state, random_tokens
from turns import say, tokens_of

from fednl_runtime import reference
from fednl_runtime.backend import LEARN
from fednl_runtime.config import HopeConfig
from fednl_runtime.engine import Engine
from fednl_runtime.errors import ConfigError, ModelFileError, StateError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.quantize import file_parameters
from fednl_runtime.onnx_backend import load
from fednl_runtime.slots import Feed, Slots
from fednl_runtime.state import MemoryState
from fednl_runtime.torch_backend import TorchBackend, longest_segment

CONFIG = dataclasses.replace(TINY, memory_period=8, top_period=8, cms_periods=(8, 24), eta_max=0.2)
ADAPT = reference.ADAPT


def parameters(seed: int = 0, config: HopeConfig = CONFIG):
    """Random parameters with a norm for each head, as a trained model has them."""
    params = dict(random_params(config, seed))
    for i in range(config.n_layer):
        params[f"layers.{i}.head_norm"] = np.tile(params[f"layers.{i}.head_norm"], (config.n_head, 1))
    return params


@pytest.fixture(scope="module")
def backend():
    return TorchBackend(CONFIG, parameters(), "random")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One model on onnxruntime and on torch."""
    config, path = (
        dataclasses.replace(CONFIG, vocab_size=TOKENIZER.vocab_size),
        tmp_path_factory.mktemp("model") / "m.onnx",
    )
    export_model(parameters(config=config), config, tiny_tokenizer_json(), path)
    onnx = load(path, threads=1)
    return onnx, TorchBackend(onnx.config, file_parameters(path), onnx.fingerprint)


def assert_close(state: MemoryState, expected: MemoryState) -> None:
    np.testing.assert_array_equal(state.position, expected.position)
    for name, tensor in expected.tensors.items():
        np.testing.assert_allclose(state.tensors[name], tensor, rtol=0, atol=1e-4, err_msg=name)


def same(a: MemoryState, b: MemoryState) -> bool:
    return np.array_equal(a.position, b.position) and all(np.array_equal(t, b.tensors[n]) for n, t in a.tensors.items())


def test_calls_of_any_length_are_the_law_for_rows_at_their_own_positions(backend):
    state = dataclasses.replace(random_state(CONFIG, 3), position=np.array([5, 13, 0]))
    tokens = random_tokens(CONFIG, 3, 40)
    adapt = np.array([[1, 1], [1, 0], [0.5, 0.25]])
    stream, start, logits = backend.open(state), 0, []
    while start < 40:
        room = 8 - int((stream.snapshot().position % 8).max())
        stop = min(40, start + (room if start % 3 else 1))
        logits.append(stream.feed(tokens[:, start:stop], adapt).copy())
        start = stop
    expected, last = reference.run(random_params(CONFIG), CONFIG, tokens, state, adapt)
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, rtol=0, atol=1e-4)
    assert_close(stream.snapshot(), last)


def test_opening_and_feeding_leave_the_given_state_alone(backend):
    state = random_state(CONFIG, 2, position=3)
    before = state.copy()
    backend.open(state).feed(random_tokens(CONFIG, 2, 1), ADAPT)
    assert same(state, before)


def test_a_snapshot_owns_its_memory_and_continues_bit_for_bit(backend):
    tokens, stream = random_tokens(CONFIG, 1, 16), backend.open(random_state(CONFIG, 1))
    stream.feed(tokens[:, :5], ADAPT)
    snapshot = stream.snapshot()
    before, again = snapshot.copy(), backend.open(snapshot)
    for piece in (slice(5, 8), slice(8, 9), slice(9, 16)):
        assert np.array_equal(stream.feed(tokens[:, piece], ADAPT), again.feed(tokens[:, piece], ADAPT))
    assert same(snapshot, before)
    assert same(stream.snapshot(), again.snapshot())


def test_a_call_across_a_segment_is_our_own_mistake(backend):
    with pytest.raises(AssertionError):
        backend.open(random_state(CONFIG, 2, position=6)).feed(random_tokens(CONFIG, 2, 2), ADAPT)


def test_rows_hold_their_memories_in_calls_of_any_rows_and_lengths(backend):
    rng, slots = np.random.default_rng(0), Slots(backend, 3)
    turns = [(slots.open(MemoryState.zeros(CONFIG), LEARN), backend.open(MemoryState.zeros(CONFIG)))]
    for step in range(24):
        if len(turns) < 3 and step % 7 == 0:
            turns.append((slots.open(turns[0][1].snapshot(), LEARN), backend.open(turns[0][1].snapshot())))
        if step % 12 == 11:
            turns.pop(0)[0].close()
        chosen = [turns[i] for i in rng.permutation(len(turns))[: 1 + step % len(turns)]]
        room = backend.segment - max(int(alone.snapshot().position[0]) % backend.segment for _, alone in chosen)
        length = int(rng.integers(1, room + 1)) if len(chosen) == 1 else 1
        tokens = rng.integers(0, CONFIG.vocab_size, (len(chosen), length))
        logits = slots.read([Feed(slot, tuple(row)) for (slot, _), row in zip(chosen, tokens, strict=True)]).copy()
        for (_, alone), row, found in zip(chosen, tokens, logits, strict=True):
            np.testing.assert_allclose(found, alone.feed(row[None], ADAPT)[0], rtol=0, atol=1e-4)
    for slot, alone in turns:
        assert_close(slot.snapshot(), alone.snapshot())


def test_new_rules_are_the_law_with_those_rules_and_leave_the_old_backend_alone(backend):
    other, changed = parameters(seed=5), parameters()
    rules = {}
    for name in ("layers.0.b_eta", "layers.1.conv", "layers.1.cms_step", "top.p", "top.step"):
        changed[name] = rules[f"rule.{name.removeprefix('layers.')}"] = other[name]
    state, tokens = random_state(CONFIG, 1), random_tokens(CONFIG, 1, 8)
    before = backend.open(state).feed(tokens, ADAPT)
    found = backend.with_rules(rules).open(state).feed(tokens, ADAPT)
    expected, _ = reference.run(changed, CONFIG, tokens, state)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.array_equal(backend.open(state).feed(tokens, ADAPT), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rule.0.b_eta", np.zeros(3)),
        ("rule.7.b_eta", np.zeros(2)),
        ("layers.0.b_eta", np.zeros(2)),
        ("norm", np.zeros(6)),
        ("rule.0.b_eta", np.array([0, np.nan])),
    ],
)
def test_rules_of_another_model_are_refused(name, value, backend):
    with pytest.raises(ModelFileError, match="rules"):
        backend.with_rules({name: value})


def test_states_of_another_model_or_with_rows_that_differ_in_number_are_refused(backend):
    with pytest.raises(StateError, match="this model needs"):
        backend.open(MemoryState.zeros(dataclasses.replace(CONFIG, d_model=12)))
    state = MemoryState.zeros(CONFIG, 2)
    with pytest.raises(StateError, match="rows"):
        backend.open(MemoryState(state.tensors, state.position[:1]))


def test_weights_of_another_configuration_are_refused():
    with pytest.raises(ModelFileError, match="weights"):
        TorchBackend(dataclasses.replace(CONFIG, d_cms=9), parameters(), "random")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "abacus"])
def test_a_device_that_is_not_here_is_refused(device):
    with pytest.raises(ConfigError, match="device"):
        TorchBackend(CONFIG, parameters(), "random", device)


@pytest.mark.parametrize(("periods", "top", "expected"), [((64, 512), 16, 16), ((512,), 512, 64), ((96,), 96, 48)])
def test_a_segment_is_the_longest_of_at_most_64_tokens_that_no_boundary_cuts(periods, top, expected):
    c = dataclasses.replace(TINY, layers=("delta",), cms_periods=periods, top_period=top)
    assert longest_segment(c) == expected


def test_a_memory_made_by_onnxruntime_goes_on_in_torch(pair):
    onnx, backend = pair
    tokens, one = random_tokens(onnx.config, 1, 24), onnx.open(MemoryState.zeros(onnx.config))
    one.feed(tokens[:, :8], ADAPT)
    other = backend.open(one.snapshot())
    for start in (8, 16):
        logits = one.feed(tokens[:, start : start + 8], ADAPT)
        np.testing.assert_allclose(other.feed(tokens[:, start : start + 8], ADAPT), logits, rtol=0, atol=1e-4)
    assert_close(other.snapshot(), one.snapshot())


def test_an_engine_on_torch_answers_as_on_onnxruntime(pair):
    answers = []
    for backend in pair:
        engine = Engine(backend, TOKENIZER)
        answers.append(tokens_of(say(engine, "hello", max_tokens=9)[0]))
        engine.shutdown()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 9


def test_the_documented_example_makes_an_engine():
    text = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    code = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
    names: dict[str, Any] = {}
    exec(code.replace('"cuda"', '"cpu"'), names)
    try:
        assert len(tokens_of(say(names["engine"], max_tokens=3)[0])) == 3
    finally:
        names["engine"].shutdown()
