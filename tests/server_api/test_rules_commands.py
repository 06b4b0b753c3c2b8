"""rules train and rules show, and serve and eval under a set of rules: what a shell sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from engines import TOKENIZER, write_tiny_model

from fednl_runtime.export.rules_graph import export_rules
from fednl_runtime.export.verify import file_parameters
from fednl_runtime.onnx_backend import load
from fednl_runtime.rules import RuleSet, load_rules
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.local import loaded

TEXT = "the cat sat on the mat. the dog ran over the hill.\n" * 120


def invoke(*args: Any) -> Any:
    """The result of a command in this process."""
    return CliRunner().invoke(cli, [str(a) for a in args])


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")
    export_rules(file_parameters(path), load(path, 1).config, path)
    return path


@pytest.fixture(name="text", scope="module")
def text_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(name="trained", scope="module")
def trained_fixture(model: Path, text: Path) -> tuple[Path, Any]:
    """A set of rules trained for a few steps, and what `rules train` printed."""
    out = text.with_name("rules.safetensors")
    options = ("--model", model, "--out", out, "--steps", 8, "--lr", 0.02, "--threads", 1, "--json")
    result = invoke("rules", "train", "--text", text, *options)
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout.splitlines()[-1])


def test_train_writes_rules_that_are_better_on_the_held_out_end_and_reports_time_and_memory(trained, text):
    out, summary = trained
    assert summary["held_out_after"] < summary["held_out_before"]
    assert summary["steps"] == 8
    assert summary["train_tokens"] + summary["held_out_tokens"] == len(TOKENIZER.encode(TEXT.strip())) + 1
    assert summary["ms_per_step"] > 0
    assert summary["peak_rss_bytes"] > 1e6
    assert summary["schema"] == load_rules(out)[0].schema_hash
    assert summary["file_bytes"] == out.stat().st_size


def test_a_rules_file_says_nothing_of_the_text_but_losses_and_counts(trained, text):
    content = trained[0].read_bytes()
    assert text.name.encode() not in content
    notes = json.loads(load_rules(trained[0])[1]["fednl.training"])
    assert all(isinstance(value, int | float) for value in notes.values())


def test_train_prints_a_table(model, text, tmp_path):
    out = tmp_path / "r.safetensors"
    result = invoke("rules", "train", "--text", text, "--model", model, "--out", out, "--steps", 1)
    assert result.exit_code == 0, result.output
    for part in ("held-out cross-entropy", "ms a step", "peak memory"):
        assert part in result.stdout


def test_training_needs_neither_torch_nor_onnx(model, text, tmp_path):
    code = "import sys; sys.modules |= {'torch': None, 'onnx': None}"
    code += "; from fednl_runtime.server_api.cli import main; main()"
    options = ["--text", text, "--model", model, "--out", tmp_path / "r.safetensors", "--steps", "1", "--threads", "1"]
    result = subprocess.run([sys.executable, "-c", code, "rules", "train", *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_show_describes_every_rule_and_how_they_were_trained(trained, model):
    summary = json.loads(invoke("rules", "show", trained[0], "--model", model, "--json").stdout)
    assert summary["rules"].keys() == load(model, 1).model.rules.keys()
    assert summary["rules"]["rule.0.b_eta"]["shape"] == [2]
    assert summary["training"]["steps"] == 8
    assert "rule.top.p" in invoke("rules", "show", trained[0]).stdout


def test_eval_under_rules_is_the_evaluation_with_those_rules(trained, model, text):
    def nats(*options: Any) -> float:
        result = invoke("eval", text, "--model", model, "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout.splitlines()[-1])["files"][0]["arms"]["on"]["nats_per_token"]

    assert nats("--rules", trained[0]) < nats() - 0.01


def test_a_backend_loads_under_the_rules_of_a_file(trained, model):
    backend, tokens = loaded(model, 1, trained[0]), np.array([[1, 2, 3]])
    expected = load(model, 1).with_rules(load_rules(trained[0])[0].tensors)
    assert np.array_equal(first_logits(backend, tokens), first_logits(expected, tokens))
    assert not np.array_equal(first_logits(backend, tokens), first_logits(load(model, 1), tokens))


def first_logits(backend: Any, tokens: Any) -> Any:
    from fednl_runtime.state import MemoryState

    return backend.open(MemoryState.zeros(backend.config)).feed(tokens, np.ones((1, 2), np.float32)).copy()


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("eval", __file__), ("rules", "show")])
def test_rules_of_another_model_are_refused_with_exit_code_3(command, trained, model, tmp_path):
    rules, _ = load_rules(trained[0])
    RuleSet(rules.tensors, "0" * 64).save(tmp_path / "other.safetensors")
    files = [tmp_path / "other.safetensors"] if command[0] == "rules" else ["--rules", tmp_path / "other.safetensors"]
    result = invoke(*command, *files, "--model", model)
    assert result.exit_code == 3
    assert "made for another model" in result.stderr


def test_a_model_without_its_gradient_graph_cannot_train(text, tmp_path):
    model = write_tiny_model(tmp_path / "alone.onnx")
    result = invoke("rules", "train", "--text", text, "--model", model)
    assert result.exit_code == 3
    assert "There is no gradient graph" in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--lr", "nan"), 2, "nan is not a number"),
        (("--cpu-share", "0"), 2, "not in the range"),
        (("--text", "none.txt"), 2, "none.txt cannot be read"),
    ],
)
def test_train_refuses_what_it_cannot_use(options, code, sentence, model, text, tmp_path):
    result = invoke("rules", "train", "--text", text, "--model", model, "--out", tmp_path / "r", *options)
    assert result.exit_code == code
    assert sentence in result.stderr
    assert not (tmp_path / "r").exists()


def test_a_text_of_a_few_words_is_too_short(model, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    result = invoke("rules", "train", "--text", tmp_path / "short.txt", "--model", model)
    assert result.exit_code == 2
    assert "too few to train rules on" in result.stderr
