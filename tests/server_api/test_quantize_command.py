"""Laws of `quantize`: a file that costs too much is not kept, and what it cost is said."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.server_api.cli import cli

TEXT = "The lighthouse keeper said that the light was out. Nobody on the island had seen it go. " * 4


@pytest.fixture(name="text")
def text_fixture(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(cli, ["quantize", *map(str, arguments)])


def test_a_file_that_costs_little_is_written_and_serves(tmp_path, text):
    result = run("--bits", 8, "--text", text, "--json", "-o", tmp_path / "small.onnx")
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0, result.output
    assert report["ok"]
    assert report["rise_percent"] < 0.5
    assert report["bytes"] == (tmp_path / "small.onnx").stat().st_size < 0.7 * report["bytes_before"]
    assert load(tmp_path / "small.onnx").model.fingerprint != load(default_model_path()).model.fingerprint


def test_a_file_that_costs_too_much_is_not_written(tmp_path, text):
    result = run("--bits", 4, "--text", text, "--max-rise", -50, "-o", tmp_path / "small.onnx")
    assert result.exit_code == 4
    assert "nothing was written" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_file_that_costs_too_much_is_kept_by_force_with_a_warning(tmp_path, text):
    result = run("--bits", 4, "--text", text, "--max-rise", -50, "--force", "-o", tmp_path / "small.onnx")
    assert result.exit_code == 0
    assert "Warning" in result.stderr
    assert (tmp_path / "small.onnx").exists()


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    result = run("--text", tmp_path / "empty.txt", "-o", tmp_path / "small.onnx")
    assert (result.exit_code, (tmp_path / "small.onnx").exists()) == (2, False)
