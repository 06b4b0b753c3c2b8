"""info, export and verify: what a shell sees of a model file."""

from __future__ import annotations

import json
import sys
import types

import pytest
from click.testing import CliRunner
from models import TINY, random_params

from fednl_runtime.errors import ModelFileError, VerificationError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.weights import fingerprint
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands import model as model_commands
from fednl_runtime.state import state_bytes


@pytest.fixture
def path(tmp_path):
    export_model(random_params(), TINY, "{}", tmp_path / "tiny.onnx")
    return tmp_path / "tiny.onnx"


def run(command, *arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


def test_info_prints_one_json_object(path):
    summary = json.loads(run(model_commands.info, path, "--json").stdout.splitlines()[-1])
    assert summary["fingerprint"] == fingerprint(random_params(), TINY)
    assert summary["state_bytes"] == state_bytes(TINY)
    assert summary["layers"] == list(TINY.layers)


def test_info_prints_a_table(path):
    result = run(model_commands.info, "--model", path)
    assert result.exit_code == 0
    assert "parameters" in result.stdout


def test_a_model_is_named_once(path):
    assert run(model_commands.info, path, "--model", path).exit_code == 2


def test_a_model_named_as_an_argument_goes_before_the_environment(path, monkeypatch):
    monkeypatch.setenv("FEDNL_INFO_MODEL", "other.onnx")
    assert CliRunner().invoke(cli, ["info", str(path)]).exit_code == 0


def test_info_of_a_missing_file_says_so(tmp_path):
    error = run(model_commands.info, tmp_path / "none.onnx").exception
    assert isinstance(error, ModelFileError)


def test_verify_ends_with_a_json_report(path):
    result = run(model_commands.verify, path, "--json")
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0
    assert report["ok"]
    assert {"name", "ok", "value", "bound"} == report["checks"][0].keys()


def test_verify_prints_the_largest_difference_of_each_tensor(path):
    assert "logits" in run(model_commands.verify, path).stdout


def test_verify_of_a_wrong_file_reports_before_it_fails(path):
    whole = path.read_bytes()
    right = fingerprint(random_params(), TINY)
    path.write_bytes(whole.replace(right.encode(), right[::-1].encode()))
    result = run(model_commands.verify, path, "--json")
    assert not json.loads(result.stdout.splitlines()[-1])["ok"]
    assert isinstance(result.exception, VerificationError)


@pytest.mark.parametrize("portable", [[], ["--portable"]])
def test_export_writes_a_file_that_verifies(portable, tmp_path, monkeypatch):
    stub = types.SimpleNamespace(load_checkpoint=lambda path: (TINY, random_params(), "{}"))
    monkeypatch.setitem(sys.modules, "fednl_runtime.export.checkpoint", stub)
    result = run(model_commands.export, "any.safetensors", "-o", tmp_path / "m.onnx", *portable)
    assert "fednl-runtime verify" in result.stdout
    assert run(model_commands.verify, tmp_path / "m.onnx").exit_code == 0
