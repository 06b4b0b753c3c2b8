"""Laws of random models: nothing in them is zero, and a file of them is loaded, quantised or not."""

from __future__ import annotations

import numpy as np
import pytest
from random_model import large_config, random_parameters, write_model

from fednl_runtime.config import HopeConfig
from fednl_runtime.onnx_backend import load
from fednl_runtime.tokenizer import Tokenizer

SMALL = HopeConfig(vocab_size=270, d_model=32, n_head=2, layers=("delta",), d_cms=32, cms_periods=(16,), cms_rank=4)


def test_every_tensor_is_drawn_and_exactly_float16():
    params = random_parameters(SMALL, 0)
    assert all(value.any() for value in params.values())
    assert all(np.array_equal(value, value.astype(np.float16)) for value in params.values())


@pytest.mark.parametrize("bits", [16, 8])
def test_a_file_serves_and_has_a_tokenizer(tmp_path, bits):
    write_model(SMALL, tmp_path / "m.onnx", bits)
    backend = load(tmp_path / "m.onnx", 1)
    assert ("quantization" in backend.model.metadata) == (bits == 8)
    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    assert tokenizer.decode(tokenizer.encode("größer")) == "größer"
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_the_large_class_has_the_shapes_of_the_bars():
    config = large_config()
    assert (config.d_model, config.n_layer, set(config.layers)) == (768, 12, {"delta"})
