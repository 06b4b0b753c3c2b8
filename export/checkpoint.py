"""Checkpoints: weights, configuration and tokenizer in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import CheckpointError
from fednl_runtime.state import Array


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step: after a crash the old or the new content is there, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_checkpoint(
    path: Path, params: Mapping[str, Array], config: HopeConfig, tokenizer_json: str, training: Mapping[str, Any]
) -> None:
    """Write weights rounded to float16, so that the file, its export and every check see the same numbers."""
    tensors = {name: np.asarray(value, np.float16, order="C") for name, value in params.items()}
    metadata = {"config": config.to_json(), "tokenizer": tokenizer_json, "training": json.dumps(training)}
    write_atomically(path, save(tensors, metadata))


def load_checkpoint(path: Path) -> tuple[HopeConfig, dict[str, Array], str]:
    """Configuration, float32 parameters by name, and the tokenizer as JSON.

    Raises:
        CheckpointError: the file is missing, damaged, or not written by `save_checkpoint`.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            params = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
        return HopeConfig.from_json(metadata["config"]), params, metadata["tokenizer"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint ({error}). Give the model.safetensors of a training run."
        ) from error


def load_training(path: Path) -> dict[str, Any]:
    """What the training run wrote about itself: tokens, seconds, settings."""
    with safe_open(path, "np") as file:
        training: dict[str, Any] = json.loads((file.metadata() or {}).get("training", "{}"))
    return training
