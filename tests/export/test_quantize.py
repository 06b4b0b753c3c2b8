"""Laws of quantisation: the nearest of few levels, a file that stands for its rounded weights, a memory untouched."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime as ort
import pytest
from engines import CONFIG, tiny_tokenizer_json
from hypothesis import given
from hypothesis import strategies as st
from models import TINY, random_params
from onnx import helper, numpy_helper

from fednl_runtime import reference
from fednl_runtime.errors import ModelFileError
from fednl_runtime.export import graph
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.integers import LEVELS, integers, linear, mix
from fednl_runtime.export.ops import MICROSOFT, Ops, typed
from fednl_runtime.export.quantize import BLOCK, blocks, file_parameters, quantize_file
from fednl_runtime.export.rules_graph import export_rules
from fednl_runtime.export.verify import verify
from fednl_runtime.export.weights import fingerprint
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.model_file import data_path, file_bytes
from fednl_runtime.onnx_backend import load, session_options
from fednl_runtime.state import MemoryState

WIDE = dataclasses.replace(
    CONFIG, d_model=64, d_cms=32, eta_max=0.2, memory_period=8, top_period=8, cms_periods=(16, 48)
)
PARAMS = random_params(WIDE)


@pytest.fixture(name="source", scope="module")
def source_fixture(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "fp32.onnx"
    export_model(PARAMS, WIDE, tiny_tokenizer_json(), path, name="tiny", metadata={"card": "a test"})
    return path


@pytest.fixture(name="path", scope="module", params=[8, 4])
def path_fixture(source, request):
    path = source.with_name(f"int{request.param}.onnx")
    quantize_file(source, path, request.param)
    return path


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_no_number_of_four_bits_moves_by_more_than_two_levels(seed, size):
    matrix = (np.random.default_rng(seed).normal(size=(2 * BLOCK, 3)) * size).astype(np.float32)
    moved = np.abs(blocks(matrix).restore() - matrix).reshape(2, BLOCK, 3).max(1)
    assert (moved <= 2.01 * np.abs(matrix).reshape(2, BLOCK, 3).max(1) / 8).all()


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6), st.sampled_from([0, 1]))
def test_no_number_of_eight_bits_moves_by_more_than_half_a_level(seed, size, axis):
    matrix = (np.random.default_rng(seed).normal(size=(37, 11)) * size).astype(np.float32)
    stored = integers(matrix, axis)
    level = np.abs(matrix).max(axis, keepdims=True) / LEVELS
    assert (np.abs(stored.restore() - matrix) <= 0.501 * level).all()


def test_two_products_with_a_byte_never_overflow_sixteen_bits():
    values = integers(np.random.default_rng(0).normal(size=(64, 9)), 0).values.astype(int)
    assert 2 * 255 * np.abs(values).max() < 2**15


@pytest.mark.parametrize("rounding", [blocks, lambda matrix: integers(matrix, 0), lambda matrix: integers(matrix, 1)])
def test_what_was_rounded_once_stays_as_it_is_and_zeros_stay_zeros(rounding):
    matrix = np.random.default_rng(0).normal(size=(BLOCK, 5)).astype(np.float32)
    matrix[:, 0] = 0
    once = rounding(matrix).restore()
    np.testing.assert_allclose(rounding(once).restore(), once, atol=1e-6)
    assert not once[:, 0].any()


def test_four_bits_err_less_with_a_fitted_scale_than_with_the_largest_number_exact():
    matrix = np.random.default_rng(1).normal(size=(8 * BLOCK, 64)).astype(np.float32)
    parts = matrix.T.reshape(64, -1, BLOCK)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)
    exact = np.clip(np.round(parts / (largest / -8)), -8, 7) * (largest / -8)
    fitted = np.square(blocks(matrix).restore() - matrix).mean()
    assert fitted < np.square(exact.reshape(matrix.T.shape) - matrix.T).mean()


def computed(build, x, matrix, scales):
    """What nodes on `x [B, T, K]` compute with a matrix of integers."""
    ops = Ops(portable=False)
    for name, value in (("matrix", matrix), ("scales", scales)):
        ops.initializers[name] = numpy_helper.from_array(value, name)
    result = build(ops, "x", "matrix", "scales")
    inputs, outputs = [typed("x", ("B", "T", x.shape[-1]))], [typed(result)]
    graph = helper.make_graph(ops.nodes, "one", inputs, outputs, initializer=list(ops.initializers.values()))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_a_row_is_rounded_alike_whatever_rows_are_beside_it_and_zeros_stay_zeros():
    rng = np.random.default_rng(3)
    stored = integers(rng.normal(size=(64, 40)).astype(np.float32), 0)
    x = (rng.normal(size=(3, 7, 64)) * 10.0 ** rng.integers(-4, 4, (3, 7, 1))).astype(np.float32)
    x[1, 2] = 0
    found = computed(linear, x, stored.values, stored.scales.ravel())
    alone = [computed(linear, row[None, None], stored.values, stored.scales.ravel())[0, 0] for row in x.reshape(-1, 64)]
    np.testing.assert_array_equal(found.reshape(-1, 40), alone)
    wanted = x @ stored.restore()
    assert not found[1, 2].any()
    assert (np.sqrt(np.square(found - wanted).mean(-1)) <= 0.02 * np.sqrt(np.square(wanted).mean(-1))).all()


def test_many_small_probabilities_count_beside_a_large_one():
    rng = np.random.default_rng(4)
    stored = integers(rng.normal(loc=1, size=(5000, 32)).astype(np.float32), 1)
    x = np.full((1, 2, 5000), 0.1 / 4999, np.float32)
    x[:, :, 7] = 0.9
    found = computed(mix, x, stored.values, stored.scales.ravel())
    np.testing.assert_allclose(found, x.astype(np.float64) @ stored.restore(), atol=2e-5)


def test_a_quantised_file_stands_for_its_rounded_weights(source, path):
    model = load(path).model
    found = file_parameters(path)
    assert model.fingerprint == fingerprint(found, WIDE) != load(source).model.fingerprint
    assert {name for name in PARAMS if not np.array_equal(found[name], np.float32(PARAMS[name]))} == {
        name for name in PARAMS if name.endswith(("w_in", "w_out", "cms_in", "cms_out", "embedding"))
    }
    assert model.metadata == {"card": "a test", "quantization": path.stem}


def test_a_quantised_file_computes_what_its_weights_say_but_for_rounded_activations(path):
    backend = load(path, threads=1)
    tokens = np.random.default_rng(2).integers(0, WIDE.vocab_size, (2, 40))
    running = backend.open(MemoryState.zeros(WIDE, 2))
    logits = [running.feed(part, np.ones((2, 2), np.float32)).copy() for part in np.split(tokens, 5, 1)]
    law = {name: value.astype(np.float64) for name, value in file_parameters(path).items()}
    wanted, _ = reference.run(law, WIDE, tokens, MemoryState.zeros(WIDE, 2, np.float64), np.ones((2, 2)))
    error = np.concatenate(logits, 1) - wanted
    assert 0 < np.sqrt(np.square(error).mean()) < 0.08 * wanted.std()


def test_a_quantised_file_is_smaller(source, path):
    assert path.stat().st_size < {"int8": 0.7, "int4": 0.55}[path.stem] * source.stat().st_size


def test_weights_too_large_for_one_file_lie_next_to_it_and_serve_the_same(source, tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "LARGEST", 10_000)
    path = tmp_path / "large.onnx"
    export_model(PARAMS, WIDE, tiny_tokenizer_json(), path, name="tiny", metadata={"card": "a test"})
    export_rules(PARAMS, WIDE, path)
    assert path.stat().st_size < source.stat().st_size - 4 * PARAMS["embedding"].size
    assert file_bytes(path) >= source.stat().st_size
    large, whole = load(path, threads=1), load(source, threads=1)
    assert large.model == whole.model
    tokens, learn = np.arange(24)[None] % WIDE.vocab_size, np.ones((1, 2), np.float32)
    found, wanted = (backend.open(MemoryState.zeros(WIDE)).feed(tokens[:, :8], learn) for backend in (large, whole))
    assert np.array_equal(found, wanted)
    assert load_gradients(path).defaults.fingerprint == large.fingerprint
    quantize_file(path, tmp_path / "int8.onnx", 8)
    assert verify(tmp_path / "int8.onnx").ok


def test_a_file_whose_weights_are_gone_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "LARGEST", 10_000)
    path = tmp_path / "large.onnx"
    export_model(PARAMS, WIDE, tiny_tokenizer_json(), path)
    data_path(path).unlink()
    with pytest.raises(ModelFileError, match=r"\.data, are not next to it"):
        load(path)


def test_weights_of_an_earlier_export_do_not_stay_next_to_a_small_one(tmp_path):
    path = tmp_path / "model.onnx"
    data_path(path).write_bytes(b"weights of before")
    export_model(PARAMS, WIDE, tiny_tokenizer_json(), path)
    assert not data_path(path).exists()


def test_a_model_whose_rows_fit_no_block_is_refused(tmp_path):
    export_model(random_params(), TINY, "{}", tmp_path / "odd.onnx")
    with pytest.raises(ModelFileError, match="blocks of 32"):
        quantize_file(tmp_path / "odd.onnx", tmp_path / "int8.onnx", 8)


def test_a_quantised_file_obeys_the_law_of_its_weights(path):
    report = verify(path)
    assert report.ok, [check for check in report.checks if not check.ok]
