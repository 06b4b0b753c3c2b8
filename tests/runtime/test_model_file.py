"""A model file says what is in it; a bad one is refused in one sentence that says what to do."""

from __future__ import annotations

import json

import onnx
import pytest
from models import TINY, random_params

from fednl_runtime import model_file
from fednl_runtime.errors import ModelFileError
from fednl_runtime.export.graph import export_model
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.state import state_bytes, state_shapes


@pytest.fixture
def path(tmp_path):
    export_model(random_params(), TINY, '{"t": 1}', tmp_path / "m.onnx", name="tiny", metadata={"card": "a test"})
    return tmp_path / "m.onnx"


def changed(path, change):
    model = onnx.load(path)
    change(model)
    onnx.save_model(model, path)


def set_metadata(path, key, value):
    def change(model):
        next(p for p in model.metadata_props if p.key == key).value = value

    changed(path, change)


def test_a_file_says_what_is_in_it(path):
    model = load(path).model
    assert (model.name, model.config, model.tokenizer_json) == ("tiny", TINY, '{"t": 1}')
    assert model.state == state_shapes(TINY)
    assert model.parameters == sum(v.size for v in random_params().values())
    assert model.metadata == {"card": "a test"}


def test_the_summary_is_json_and_has_what_info_promises(path):
    summary = load(path).model.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["state_bytes"] == state_bytes(TINY)
    promised = {"parameters", "n_layer", "d_model", "vocab_size", "layers", "rules_bytes", "fingerprint"}
    assert promised <= summary.keys()


def test_the_rules_are_the_convolution_the_gates_and_the_slow_levels(path):
    model = load(path).model
    layer = {"conv", "r_eta", "b_eta", "r_alpha", "b_alpha", "cms_step", "cms_decay"}
    assert {n.split(".")[2] for n in model.rules} == layer | {"p", "step", "decay"}
    assert model.rules_bytes == 4 * sum(
        v.size for n, v in random_params().items() if n.split(".")[-1] in layer or "top" in n
    )


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"", "cut short|cannot load"),
        (b"not a model", "not an ONNX file"),
        (b"\x08\x0b" + bytes(99), "ONNX|cannot load"),
    ],
)
def test_a_file_that_is_not_onnx_is_refused(content, advice, tmp_path):
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=advice):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share, path):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelFileError):
        load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="There is no model file"):
        load(tmp_path / "none.onnx")


def test_a_foreign_onnx_file_is_refused(path):
    changed(path, lambda model: model.ClearField("metadata_props"))
    with pytest.raises(ModelFileError, match="not a FedNL model"):
        load(path)


def test_a_newer_format_asks_for_an_upgrade(path):
    set_metadata(path, "fednl.format", "2")
    with pytest.raises(ModelFileError, match="pip install -U fednl-runtime"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "one"), ("config", "{}"), ("config", "no"), ("state", "{}"), ("state", "[]"), ("rules", "3"),
        ("segment", "0"), ("segment", "x"), ("segment", "1000000000"), ("parameters", "9" * 400),
        ("config", "[" * 100_000), ("state", "[" * 100_000),
        ("in_place", '["9.cms_f"]'), ("parameters", ""), ("operators", "{"),
    ],
)  # fmt: skip
def test_damaged_metadata_are_refused(key, value, path):
    set_metadata(path, f"fednl.{key}", value)
    with pytest.raises(ModelFileError, match="again"):
        load(path)


@pytest.mark.parametrize("key", ["fingerprint", "tokenizer", "min_onnxruntime", "name", "portable"])
def test_missing_metadata_are_refused(key, path):
    def change(model):
        kept = [p for p in model.metadata_props if p.key != f"fednl.{key}"]
        model.ClearField("metadata_props")
        model.metadata_props.extend(kept)

    changed(path, change)
    with pytest.raises(ModelFileError, match="damaged"):
        load(path)


def test_a_state_input_without_its_output_is_refused(path):
    def change(model):
        outputs = [o for o in model.graph.output if o.name != "present.0.s"]
        model.graph.ClearField("output")
        model.graph.output.extend(outputs)

    changed(path, change)
    with pytest.raises(ModelFileError, match=r"present\.0\.s"):
        load(path)


def test_a_state_of_another_shape_than_its_metadata_say_is_refused(path):
    def change(model):
        past = next(i for i in model.graph.input if i.name == "past.top.token")
        past.type.tensor_type.shape.dim[1].dim_value = 99

    changed(path, change)
    with pytest.raises(ModelFileError, match="again"):
        load(path)


def test_an_unknown_operator_says_what_to_do(path):
    def change(model):
        model.graph.node[-1].op_type = "Teleport"

    changed(path, change)
    with pytest.raises(ModelFileError, match="--portable"):
        load(path)


def test_a_newer_opset_asks_for_a_newer_onnxruntime(path):
    def change(model):
        model.opset_import[0].version = 9999

    changed(path, change)
    with pytest.raises(ModelFileError, match="pip install -U onnxruntime"):
        load(path)


def test_an_installation_without_a_model_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(model_file.importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelFileError, match="--model"):
        default_model_path()
    (tmp_path / "hope.onnx").touch()
    assert default_model_path() == tmp_path / "hope.onnx"
