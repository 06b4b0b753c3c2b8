"""Bytes of one upload in each encoding, beside federated averaging of all weights and of LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from fednl_runtime.config import HopeConfig
from fednl_runtime.fed_sync.update import ENCODINGS, ClientUpdate, Schema, encode
from fednl_runtime.model_file import ModelFile, default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.rules import schema_hash

RANK = 8


def upload(model: ModelFile, encoding: str) -> int:
    """Bytes of an update of all rules; they do not depend on the numbers."""
    schema = Schema(model.rules, schema_hash(model.rules, model.fingerprint))
    delta = schema.tensors(np.random.default_rng(0).standard_normal(schema.size) / np.sqrt(schema.size))
    return len(encode(ClientUpdate(schema.hash, 1, 100_000, 1.0, 0.0, "0.1.0", delta), schema, encoding).body)


def lora_parameters(c: HopeConfig, rank: int = RANK) -> int:
    """Numbers of LoRA adapters on every linear layer, as the layers are stored: fused ones count once."""
    mixer = [(5 * c.d_model, c.d_model), (c.d_model, c.d_model)]
    level = [(c.d_cms + c.cms_rank + c.d_model, c.d_model), (c.d_model, c.d_cms)]
    return rank * c.n_layer * sum(a + b for a, b in [*mixer, *c.n_cms * level])


def sizes(model: ModelFile) -> dict[str, Any]:
    """All figures, in bytes; the others send fp32, as they commonly do."""
    uploads = {encoding: upload(model, encoding) for encoding in ENCODINGS}
    others = {"all_weights": 4 * model.parameters, f"lora_{RANK}": 4 * lora_parameters(model.config)}
    ratios = {name: {e: round(size / own, 1) for e, own in uploads.items()} for name, size in others.items()}
    return {"model": model.name, "rules": model.rules_bytes // 4, **uploads, **others, "times_smaller_than": ratios}


@click.command()
@click.option("--model", type=click.Path(dir_okay=False, path_type=Path), help="A model [default: the shipped one].")
def main(model: Path | None) -> None:
    """Print the figures of a model as one JSON object."""
    print(json.dumps(sizes(load(model or default_model_path()).model)))


if __name__ == "__main__":
    main()
