"""`verify` passes a sound file and catches each kind of wrong one."""

from __future__ import annotations

import dataclasses
import sys
import types

import numpy as np
import onnx
import pytest
from models import TINY, random_params

from fednl_runtime.errors import ModelFileError, VerificationError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.ops import Ops
from fednl_runtime.export.verify import BOUND, Check, require, reread, verify
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load

CHAOTIC = dataclasses.replace(TINY, d_model=10, cms_periods=(4, 12), top_period=8, memory_period=4)
CONFIG = dataclasses.replace(CHAOTIC, eta_max=0.2)


@pytest.fixture
def path(tmp_path):
    export_model(random_params(CONFIG), CONFIG, "{}", tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def broken(path, change):
    """The file with its graph changed in place."""
    model = onnx.load(path)
    change(model.graph)
    onnx.save_model(model, path)
    return verify(path)


def test_a_sound_file_passes(path):
    report = verify(path)
    require(report)
    assert report.to_dict()["ok"]
    assert 0 < report.to_dict()["max_abs_logits"] < 1e-4


def test_a_portable_file_passes(tmp_path):
    export_model(random_params(CONFIG), CONFIG, "{}", tmp_path / "m.onnx", Ops(portable=True))
    require(verify(tmp_path / "m.onnx"))


def test_a_checkpoint_is_compared_in_torch(tmp_path, monkeypatch):
    hope = pytest.importorskip("fednl_runtime.hope")
    params = hope.parameters(hope.Hope(CONFIG))
    export_model(params, CONFIG, "{}", tmp_path / "m.onnx")
    stub = types.SimpleNamespace(load_checkpoint=lambda path: (CONFIG, params, "{}"))
    monkeypatch.setitem(sys.modules, "fednl_runtime.export.checkpoint", stub)
    report = verify(tmp_path / "m.onnx", checkpoint="any.safetensors")
    require(report)
    assert sum(check.name.startswith("torch: ") for check in report.checks) >= 10


def test_a_changed_weight_is_caught_by_the_fingerprint(path):
    def change(graph):
        weight = next(t for t in graph.initializer if t.name == "norm")
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, "norm"))

    assert [c.name for c in broken(path, change).checks if not c.ok] == ["fingerprint"]


def test_a_lost_state_write_is_caught(path):
    def change(graph):
        for node in graph.node:
            node.output[:] = ["lost" if name == "present.0.conv" else name for name in node.output]
        graph.node.append(onnx.helper.make_node("Identity", ["past.0.conv"], ["present.0.conv"]))

    with pytest.raises(VerificationError, match="Do not use it"):
        require(broken(path, change))


def test_a_constant_that_is_off_is_caught(path):
    def change(graph):
        for node in graph.node:
            if node.op_type == "LinearAttention":
                next(a for a in node.attribute if a.name == "scale").f = 0.5

    assert not broken(path, change).ok


def test_a_value_that_is_not_a_number_fails_its_check():
    assert not Check("x", float("nan"), 1.0).ok
    assert not Check("x", np.inf, 1.0).ok


def test_a_memory_that_blows_rounding_up_is_caught(tmp_path):
    export_model(random_params(CHAOTIC), CHAOTIC, "{}", tmp_path / "m.onnx")
    failed = [check.name for check in verify(tmp_path / "m.onnx").checks if not check.ok]
    assert failed == ["2,048 tokens of its own text, read back"]


def test_the_shipped_model_reads_its_own_text_back_within_the_bound_of_a_single_call():
    try:
        path = default_model_path()
    except ModelFileError:
        pytest.skip("no model is shipped")
    assert reread(load(path, 1), BOUND).ok
