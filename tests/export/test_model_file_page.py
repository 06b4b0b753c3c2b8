"""docs/model-file.md names what a model file holds, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
from models import TINY, random_params

from fednl_runtime.export.graph import export_model
from fednl_runtime.export.weights import RULES

PAGE = (Path(__file__).parents[2] / "docs/model-file.md").read_text()


def test_the_page_lists_the_metadata_of_a_file(tmp_path):
    export_model(random_params(), TINY, "{}", tmp_path / "tiny.onnx")
    model = onnx.load(tmp_path / "tiny.onnx")
    listed = set(re.findall(r"^\| `(fednl\.\w+)` \|", PAGE, re.MULTILINE))
    assert listed == {entry.key for entry in model.metadata_props}


def test_the_page_names_every_input_and_output_of_a_file(tmp_path):
    export_model(random_params(), TINY, "{}", tmp_path / "tiny.onnx")
    graph = onnx.load(tmp_path / "tiny.onnx").graph
    values = {value.name for value in (*graph.input, *graph.output)}
    kinds = {re.sub(r"^(past|present|rule)\.(\d+|top)\..*", r"\1", name) for name in values}
    assert kinds == {"input_ids", "position", "adapt", "past", "rule", "logits", "present"}
    tensors = {name.removeprefix("past.") for name in values if name.startswith("past.")}
    named = {re.sub(r"^\d+", "{i}", name) for name in tensors}
    assert named == set(re.findall(r"`((?:\{i\}|top)\.\w+)`", PAGE))


def test_the_page_names_every_rule():
    assert [name for name in RULES if f"`{name}`" not in PAGE] == []
