"""What each level's learning is worth: streaming cross-entropy with levels silenced, same weights.

A level is silenced by its rules (step size 0), which are inputs of the graph. The token memories are
never silenced: they are also the sequence mixer. The last line printed is a JSON object.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from fednl_runtime.backend import LEARN
from fednl_runtime.corpus import encode_documents, read_text
from fednl_runtime.evaluate import stream
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import OnnxBackend, load
from fednl_runtime.state import Tokens
from fednl_runtime.tokenizer import Tokenizer

SILENT = -40.0
"""A step size is a sigmoid of this rule."""


def silenced(backend: OnnxBackend, *suffixes: str) -> OnnxBackend:
    """The backend with every rule of those endings set to no step."""
    shapes = backend.model.rules
    names = [name for name in shapes if name.endswith(suffixes)]
    return backend.with_rules({name: np.full(shapes[name], SILENT, np.float32) for name in names})


def score(backend: OnnxBackend, tokens: Tokens) -> float:
    """Nats a token of tokens `[T + 1]` read from an empty memory."""
    adapt = np.array([LEARN], np.float32)
    return float(stream(backend, tokens[None], lambda _: adapt, lambda _: None).mean())


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--tokens", default=16384, show_default=True, help="Tokens of each file.")
def main(files: tuple[Path, ...], model: Path | None, tokens: int) -> None:
    """Evaluate FILES with all levels, without the top level, without CMS, and with neither."""
    backend = load(model or default_model_path())
    tokenizer = Tokenizer(backend.tokenizer_json)
    arms = {
        "all": backend,
        "without_top": silenced(backend, "top.step"),
        "without_cms": silenced(backend, "cms_step"),
        "without_both": silenced(backend, "top.step", "cms_step"),
    }
    results = {}
    for file in files:
        ids = encode_documents(tokenizer, read_text(file))[: tokens + 1]
        scores = {name: score(arm, ids) for name, arm in arms.items()}
        results[file.name] = scores
        click.echo(f"{file.name}: " + ", ".join(f"{name} {nats:.3f}" for name, nats in scores.items()))
    rows = results.values()
    cost = {name: float(np.mean([100 * (row[name] / row["all"] - 1) for row in rows])) for name in arms}
    click.echo(json.dumps({"tokens": tokens, "files": results, "percent_worse_than_all": cost}))


if __name__ == "__main__":
    main()
