"""Laws of checkpoints: float16 exactly, one sentence for a wrong file, and no half-written one."""

from __future__ import annotations

import numpy as np
import pytest
from models import TINY, random_params
from safetensors.numpy import save_file

from fednl_runtime.errors import CheckpointError
from fednl_runtime.export import checkpoint
from fednl_runtime.export.checkpoint import load_checkpoint, load_training, save_checkpoint, write_atomically


@pytest.fixture(name="path")
def path_fixture(tmp_path):
    save_checkpoint(tmp_path / "m.safetensors", random_params(), TINY, "{}", {"step": 3})
    return tmp_path / "m.safetensors"


def test_a_checkpoint_gives_back_its_parameters_rounded_to_float16(path):
    config, params, tokenizer_json = load_checkpoint(path)
    assert (config, tokenizer_json, load_training(path)) == (TINY, "{}", {"step": 3})
    assert params.keys() == random_params().keys()
    for name, value in random_params().items():
        np.testing.assert_array_equal(params[name], np.asarray(value, np.float16).astype(np.float32))


def test_a_loaded_checkpoint_is_saved_bit_for_bit(path, tmp_path):
    config, params, tokenizer_json = load_checkpoint(path)
    save_checkpoint(tmp_path / "again.safetensors", params, config, tokenizer_json, {"step": 3})
    _, again, _ = load_checkpoint(tmp_path / "again.safetensors")
    assert all(np.array_equal(again[name], value) for name, value in params.items())


def test_transposed_parameters_are_stored_as_they_read(tmp_path):
    params = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.float32(2)}
    save_checkpoint(tmp_path / "m.safetensors", params, TINY, "{}", {})
    _, loaded, _ = load_checkpoint(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded["a"], params["a"])
    assert loaded["b"].shape == ()


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "cut", "foreign", "folder"])
def test_a_file_that_is_no_checkpoint_is_refused_in_one_sentence(damage, path, tmp_path):
    wrong, whole = tmp_path / "wrong", path.read_bytes()
    contents = {"empty": b"", "garbage": b"hello world" * 9, "cut": whole[:-9]}
    if damage in contents:
        wrong.write_bytes(contents[damage])
    elif damage == "foreign":
        save_file({"x": np.zeros(3)}, wrong)
    elif damage == "folder":
        wrong.mkdir()
    with pytest.raises(CheckpointError, match=r"wrong is not a checkpoint \(.*\)\. Give the model\.safetensors"):
        load_checkpoint(wrong)


@pytest.mark.parametrize("crash", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(crash, path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    old = path.read_bytes()
    monkeypatch.setattr(checkpoint.os, "fsync", fail) if crash == "fsync" else monkeypatch.setattr(
        checkpoint.Path, "replace", fail
    )
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, {}, TINY, "{}", {})
    assert path.read_bytes() == old


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    for content in (b"old", b"newer"):
        write_atomically(tmp_path / "file", content)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"newer"]
