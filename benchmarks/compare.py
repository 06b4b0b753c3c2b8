"""Checkpoints against each other on the same texts: streaming cross-entropy at 8K and 32K tokens, in torch.

Give trained runs of Hope, of the delta profile and of the baseline transformer with the same tokenizer. The
last line printed is a JSON object.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from baselines import Transformer, TransformerWithTop, size
from scoring import carried, cut_short
from streams import read_tokens

from fednl_runtime.errors import CheckpointError
from fednl_runtime.export.checkpoint import load_checkpoint, load_training
from fednl_runtime.hope import Hope
from fednl_runtime.tokenizer import Tokenizer

LENGTHS = (8192, 32768)


def open_checkpoint(path: Path) -> tuple[Hope, str]:
    """A trained model in full precision, Hope or the baseline, and its tokenizer as JSON."""
    config, params, tokenizer = load_checkpoint(path)
    transformer = TransformerWithTop if "top.p" in params else Transformer
    model = (transformer if "layers.0.mlp_in" in params else Hope)(config)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return model, tokenizer


def averages(files: dict[str, dict[str, dict[str, Any]]], length: int) -> dict[str, dict[str, float]]:
    """Mean nats a token of each model and arm over the files that are long enough."""
    rows = [models for models in files.values() if all(length in scores["on"] for scores in models.values())]
    return {
        name: {arm: float(np.mean([row[name][arm][length] for row in rows])) for arm in ("on", "reset")}
        for name in (rows[0] if rows else {})
    }


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--run", "runs", multiple=True, required=True, help="NAME=model.safetensors; the first is compared.")
def main(files: tuple[Path, ...], runs: tuple[str, ...]) -> None:
    """Score every run on FILES."""
    torch.set_float32_matmul_precision("highest")
    paths = {name: Path(path) for name, _, path in (run.partition("=") for run in runs)}
    models = {name: open_checkpoint(path) for name, path in paths.items()}
    tokenizers = {tokenizer for _, tokenizer in models.values()}
    if len(tokenizers) > 1:
        raise CheckpointError("The runs have different tokenizers, so their nats a token do not compare.")
    tokenizer = Tokenizer(tokenizers.pop())
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for file in files:
        tokens = torch.from_numpy(read_tokens(tokenizer, file)[: LENGTHS[-1] + 1])
        tokens = tokens[: (len(tokens) - 1) // 512 * 512 + 1][None]
        lengths = [n for n in LENGTHS if n < tokens.shape[1]]
        results[file.name.split(".")[0]] = row = {}
        for name, (model, _) in models.items():
            scores = {"on": carried(model, tokens)[0], "reset": cut_short(model, tokens)[0]}
            row[name] = {arm: {n: float(s[:n].mean()) for n in lengths} for arm, s in scores.items()}
        click.echo(f"{file.name}: {row}")
    about = {
        name: {"parameters": size(models[name][0])}
        | {key: load_training(path).get(key) for key in ("tokens", "seconds")}
        for name, path in paths.items()
    }
    click.echo(json.dumps({"runs": about, "averages": {n: averages(results, n) for n in LENGTHS}, "files": results}))


if __name__ == "__main__":
    main()
