"""train and eval: from a folder of texts to a model file, and what a shell sees of whether it learns."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from engines import TOKENIZER, write_tiny_model

from fednl_runtime.corpus import documents
from fednl_runtime.errors import RequestError
from fednl_runtime.evaluate import ARMS, Arm
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands import learn as learn_commands
from fednl_runtime.server_api.commands.plot import draw_curves
from fednl_runtime.tokenizer import END_OF_TEXT

SENTENCES = ("the cat sat on the mat", "a dog ran over the hill", "small birds sing in the morning", "rain falls")
SMALL = ("--vocab-size", 300, "--layers", "delta,self_modifying", "--d-model", 32, "--no-compile", "--threads", 1)


def invoke(*args: Any) -> Any:
    """The result of a command in this process."""
    return CliRunner().invoke(cli, [str(a) for a in args])


def train(*args: Any) -> Any:
    """The result of `train`, which sets up torch for its process; here that is undone."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        return invoke("train", *SMALL, *args)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def last_json(result: Any) -> Any:
    """The JSON object that a command prints last."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def text_of(seed: int, lines: int) -> str:
    """Random lines out of a few sentences, in documents of ten lines."""
    rng = np.random.default_rng(seed)
    chosen = [SENTENCES[i] for i in rng.integers(0, len(SENTENCES), lines)]
    parts = ["\n".join(chosen[i : i + 10]) for i in range(0, lines, 10)]
    return f"\n{END_OF_TEXT}\n".join(parts)


@pytest.fixture(name="corpus", scope="module")
def corpus_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for seed, (domain, source) in enumerate((("tales", "one"), ("tales", "two"), ("notes", "three"))):
        (folder / domain).mkdir(exist_ok=True)
        (folder / domain / f"{source}.txt").write_text(text_of(seed, 400))
    return folder


@pytest.fixture(name="trained", scope="module")
def trained_fixture(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of a few seconds, and what `train` printed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return folder, train(corpus, "-o", folder, "--hours", 0.001, "--without", "notes")


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


@pytest.fixture(name="text")
def text_fixture(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(text_of(9, 80))
    return tmp_path / "text.txt"


def test_train_writes_weights_log_tokenizer_and_a_summary(trained):
    folder, result = trained
    summary = last_json(result)
    assert {p.name for p in folder.iterdir()} >= {"model.safetensors", "resume.pt", "log.jsonl", "tokenizer.json"}
    assert summary["sources"] == ["tales/one", "tales/two"]
    assert summary["step"] == len((folder / "log.jsonl").read_text().splitlines())
    assert summary["tokens"] == 8 * 512 * summary["step"]
    assert summary["validation_nats_per_token"] == {}
    assert "export" in result.stderr


def test_a_run_in_the_same_folder_goes_on(trained, corpus, tmp_path):
    folder, result = trained
    shutil.copytree(folder, tmp_path / "again")
    again = last_json(train(corpus, "-o", tmp_path / "again", "--hours", 0, "--without", "notes"))
    assert again["step"] == last_json(result)["step"]


def test_a_run_of_another_shape_is_refused(trained, corpus):
    result = train(corpus, "-o", trained[0], "--hours", 0, "--without", "notes", "--d-model", 16)
    assert result.exit_code == 1
    assert "another configuration" in result.stderr


def test_a_trained_model_is_exported_verified_and_evaluated(trained, text, tmp_path):
    exported = invoke("export", trained[0] / "model.safetensors", "-o", tmp_path / "m.onnx")
    assert exported.exit_code == 0, exported.output
    report = last_json(invoke("verify", tmp_path / "m.onnx", "--json", "--against", trained[0] / "model.safetensors"))
    assert report["ok"]
    found = last_json(invoke("eval", text, "--model", tmp_path / "m.onnx", "--json"))
    assert 0 < found["files"][0]["arms"]["on"]["nats_per_token"] < math.log(300) + 1


def test_eval_prints_one_json_object_and_draws_its_curves(model, text, tmp_path):
    picture = tmp_path / "curves.png"
    other = shutil.copy(text, tmp_path / "other.txt")
    report = last_json(invoke("eval", text, other, "--model", model, "--json", "--plot", picture, "--threads", 1))
    assert report.keys() == {"files", "on_vs_reset_percent", "on_vs_frozen_percent"}
    assert [file["file"] for file in report["files"]] == ["text.txt", "other.txt"]
    for file in report["files"]:
        assert file.keys() == {"file", "tokens", "arms"}
        assert tuple(file["arms"]) == ARMS
        for arm in file["arms"].values():
            assert arm.keys() == {"nats_per_token", "bits_per_byte", "bins"}
            assert len(arm["bins"]) == math.ceil((file["tokens"] - 1) / 1024)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_eval_counts_bits_over_the_bytes_that_are_predicted(model, text):
    file = last_json(invoke("eval", text, "--model", model, "--json"))["files"][0]
    parts = [TOKENIZER.encode(d) for d in documents(text.read_text())]
    num_bytes = sum(len(TOKENIZER.decode_bytes(p)) for p in parts) - len(TOKENIZER.token_bytes(parts[0][0]))
    assert file["tokens"] == sum(len(p) + 1 for p in parts)
    nats = file["arms"]["on"]["nats_per_token"] * (file["tokens"] - 1)
    assert file["arms"]["on"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes)


def test_eval_prints_a_table(model, text):
    result = invoke("eval", text, "--model", model)
    assert result.exit_code == 0
    assert "on vs reset" in result.stdout
    assert "average" in result.stdout


@pytest.mark.parametrize("content", ["", "\n\n", f"{END_OF_TEXT}\n", "a"])
def test_eval_of_a_file_without_text_says_so(content, model, tmp_path):
    (tmp_path / "empty.txt").write_text(content)
    result = invoke("eval", tmp_path / "empty.txt", "--model", model)
    assert result.exit_code == 2
    assert "empty.txt holds no text" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_eval_of_a_missing_or_damaged_file_says_so(model, tmp_path):
    missing = invoke("eval", tmp_path / "none.txt", "--model", model)
    (tmp_path / "damaged.txt.xz").write_bytes(b"not xz")
    damaged = invoke("eval", tmp_path / "damaged.txt.xz", "--model", model)
    assert (missing.exit_code, damaged.exit_code) == (2, 2)
    assert "none.txt" in missing.stderr
    assert "damaged.txt.xz cannot be read" in damaged.stderr


def test_eval_without_a_model_file_says_so(text, tmp_path):
    assert invoke("eval", text, "--model", tmp_path / "none.onnx").exit_code == 3


@pytest.mark.parametrize("name", ["curves.doc", "none/curves.png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_evaluation(name, text, tmp_path, monkeypatch):
    monkeypatch.setattr(learn_commands, "evaluate_files", None)
    result = invoke("eval", text, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert "Cannot draw to" in result.stderr


def test_a_picture_without_matplotlib_says_how_to_install_it(text, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = invoke("eval", text, "--plot", tmp_path / "curves.png")
    assert (result.exit_code, "pip install 'fednl-runtime[plots]'" in result.stderr) == (2, True)


def test_a_picture_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "curves.png").mkdir()
    arm = Arm(1.0, 1.0, [1.0])
    with pytest.raises(RequestError, match="Cannot draw to"):
        draw_curves([("text.txt", 2, dict.fromkeys(ARMS, arm))], tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--without", "news"], "no domain news"),
        (["--without", "tales", "--without", "notes"], "to train on"),
        (["--layers", "delta,attention"], "layers is"),
        (["--vocab-size", "70000"], "70000 is not in the range"),
        (["--d-model", "30"], "multiple of n_head"),
        (["--hours", "nan"], "not a number of hours"),
    ],
)
def test_train_refuses_what_it_cannot_train(options, sentence, corpus, tmp_path):
    result = train(corpus, "-o", tmp_path / "run", "--hours", 0, *options)
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr


def test_train_refuses_a_corpus_shorter_than_a_window(tmp_path):
    (tmp_path / "corpus/d").mkdir(parents=True)
    (tmp_path / "corpus/d/s.txt").write_text("too short")
    result = train(tmp_path / "corpus", "-o", tmp_path / "run", "--hours", 1)
    assert result.exit_code == 1
    assert "more than 512 tokens" in result.stderr
