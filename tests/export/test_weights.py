"""Parameters in a file: what is stored comes back, and the fingerprint sees weights only."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from models import TINY, random_params

from fednl_runtime.export.graph import export_model
from fednl_runtime.export.ops import Ops
from fednl_runtime.export.quantize import file_parameters
from fednl_runtime.export.weights import fingerprint, fits_float16, recovered, stored
from fednl_runtime.onnx_backend import load, session_options


def single(dtype=np.float32):
    """Random parameters exact in `dtype`, fp32."""
    return {n: v.astype(dtype).astype(np.float32) for n, v in random_params().items()}


def test_stored_parameters_are_recovered_bit_for_bit():
    params = single()
    found = recovered(stored(params))
    assert found.keys() == params.keys()
    assert all(np.array_equal(found[n], params[n]) and found[n].shape == params[n].shape for n in params)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_file_holds_the_parameters_without_loss(dtype, portable, tmp_path):
    params = single(dtype)
    export_model(params, TINY, "{}", tmp_path / "m.onnx", Ops(portable))
    found = file_parameters(tmp_path / "m.onnx")
    assert all(np.array_equal(found[n], params[n]) for n in params)
    assert load(tmp_path / "m.onnx", 1).fingerprint == fingerprint(params, TINY)


def test_float16_storage_takes_half_the_bytes(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=3000)
    sizes = []
    for dtype in (np.float16, np.float32):
        params = {n: v.astype(dtype).astype(np.float32) for n, v in random_params(config).items()}
        export_model(params, config, "{}", tmp_path / "m.onnx")
        sizes.append((tmp_path / "m.onnx").stat().st_size)
    assert sizes[1] - sizes[0] >= 2 * config.vocab_size * config.d_model


def test_the_session_folds_the_casts_of_weights(tmp_path):
    export_model(single(np.float16), TINY, "{}", tmp_path / "m.onnx")
    stored = {t.name for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
    nodes = onnx.load(tmp_path / "optimised.onnx").graph.node
    assert not [node for node in nodes if node.op_type == "Cast" and node.input[0] in stored]


def test_the_fingerprint_does_not_depend_on_the_width_of_the_arrays():
    params = single()
    wide = {n: v.astype(np.float64) for n, v in params.items()}
    assert fingerprint(params, TINY) == fingerprint(wide, TINY)


def test_a_scalar_kept_as_an_array_of_one_is_the_same_parameter():
    params = single()
    flat = {n: np.atleast_1d(v) for n, v in params.items()}
    assert recovered(stored(flat))["top.step"].shape == ()
    assert fingerprint(flat, TINY) == fingerprint(params, TINY)


def test_the_fingerprint_sees_one_changed_weight():
    params = single()
    changed = {**params, "norm": params["norm"] + 1e-6}
    assert fingerprint(params, TINY) != fingerprint(changed, TINY)


def test_a_number_beyond_float16_is_not_stored_as_one():
    assert fits_float16(np.array([1.0, 0.5, -2.0]))
    assert not fits_float16(np.array([1e6]))
    assert not fits_float16(np.array([0.1], np.float32))
