"""Laws of quantisation: the nearest of few levels, a file that stands for its rounded weights, a memory untouched."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engines import CONFIG, tiny_tokenizer_json
from hypothesis import given
from hypothesis import strategies as st
from models import TINY, random_params

from fednl_runtime import reference
from fednl_runtime.errors import ModelFileError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.quantize import BLOCK, file_parameters, quantize, quantize_file, quantize_tiles
from fednl_runtime.export.verify import verify
from fednl_runtime.export.weights import fingerprint
from fednl_runtime.onnx_backend import load
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


@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 4]), st.floats(1e-6, 1e6))
def test_no_number_moves_by_more_than_a_level_or_two(seed, bits, size):
    matrix = (np.random.default_rng(seed).normal(size=(3, 2 * BLOCK)) * size).astype(np.float32)
    moved = np.abs(quantize(matrix, bits).restore() - matrix).reshape(3, 2, BLOCK).max(-1)
    level = np.abs(matrix).reshape(3, 2, BLOCK).max(-1) / 2 ** (bits - 1)
    assert (moved <= {8: 1.01, 4: 2.01}[bits] * level).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_rounded_once_stays_as_it_is(bits):
    matrix = np.random.default_rng(0).normal(size=(5, BLOCK)).astype(np.float32)
    once = quantize(matrix, 8).restore() if bits == 8 else quantize(matrix, 4).restore()
    np.testing.assert_allclose(quantize(once, bits).restore(), once, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 96), (37, 64), (5, 3)])
def test_tiles_stand_for_the_same_numbers_by_rows_and_by_columns(shape):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows, columns = quantize_tiles(matrix)
    found = rows.restore()[:, : shape[1]]
    np.testing.assert_array_equal(found, columns.restore()[:, : shape[0]].T)
    assert np.abs(found - matrix).max() <= np.abs(matrix).max() / 127


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_zeros_stays_one(bits):
    np.testing.assert_array_equal(quantize(np.zeros((2, BLOCK)), bits).restore(), np.zeros((2, BLOCK)))


def test_four_bits_err_less_with_a_fitted_scale_than_with_the_largest_number_exact():
    matrix = np.random.default_rng(1).normal(size=(64, 8 * BLOCK)).astype(np.float32)
    blocks = matrix.reshape(64, -1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    exact = np.clip(np.round(blocks / (largest / -8)), -8, 7) * (largest / -8)
    fitted = np.square(quantize(matrix, 4).restore() - matrix).mean()
    assert fitted < np.square(exact.reshape(matrix.shape) - matrix).mean()


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


def test_a_model_whose_rows_fit_no_block_is_refused(tmp_path):
    export_model(random_params(), TINY, "{}", tmp_path / "odd.onnx")
    with pytest.raises(ModelFileError, match="blocks of 32"):
        quantize_file(tmp_path / "odd.onnx", tmp_path / "int8.onnx", 8)


def test_a_quantised_file_obeys_the_law_of_its_weights(path):
    report = verify(path)
    assert report.ok, [check for check in report.checks if not check.ok]
