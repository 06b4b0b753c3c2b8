"""Rule sets: the learning rules of a model as named arrays, their schema, and their file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fednl_runtime.errors import RulesError
from fednl_runtime.state import Array, Tensors

LOGIT = 12.0
"""Largest magnitude of a rate before its sigmoid: beyond it the rate is 0 or 1 and its gradient is lost."""

RANGES = {
    "b_eta": LOGIT,
    "b_alpha": LOGIT,
    "cms_step": LOGIT,
    "cms_decay": LOGIT,
    "step": LOGIT,
    "decay": LOGIT,
    "conv": 8.0,
    "r_eta": 8.0,
    "r_alpha": 8.0,
    "p": 8.0,
}
"""Largest magnitude of the numbers of a rule, by the last part of its name."""

WEIGHTS = "model"
"""What a gradient graph calls the place of its weights; it is given the bytes of the file that holds them."""

Shapes = Mapping[str, tuple[int, ...]]


def schema_hash(shapes: Shapes, fingerprint: str) -> str:
    """SHA-256 over the model's fingerprint and the sorted names, types and shapes of its rules.

    Rule sets may be compared, averaged or applied only where this hash is the same.
    """
    rules = [[name, "float32", list(shape)] for name, shape in sorted(shapes.items())]
    text = json.dumps({"fingerprint": fingerprint, "rules": rules}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def gradients_path(model: Path) -> Path:
    """Where the gradient graph of a model file is: `model.onnx` -> `model.rules.onnx`."""
    return model.with_suffix(".rules.onnx")


def in_range(name: str, value: Array) -> Array:
    """A rule with every number moved into its safe range."""
    limit = RANGES.get(name.rpartition(".")[2], np.inf)
    return np.clip(value, -limit, limit)


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """All rules of one model, fp32, by the name of their graph input `rule.*`."""

    tensors: Tensors
    fingerprint: str
    """Of the model that the rules belong to."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each rule, by name."""
        return {name: value.shape for name, value in self.tensors.items()}

    @property
    def schema_hash(self) -> str:
        """The hash that another rule set must have to be of the same kind."""
        return schema_hash(self.shapes, self.fingerprint)

    def require(self, shapes: Shapes, fingerprint: str) -> None:
        """Raise RulesError unless these are finite rules of the model with those rules and that fingerprint."""
        if self.fingerprint != fingerprint:
            raise RulesError("These rules were made for another model. Use rules made for this one.")
        if self.schema_hash != schema_hash(shapes, fingerprint):
            raise RulesError("These rules have other names or shapes than the model's. Use rules made for this one.")
        for name, value in self.tensors.items():
            if not np.isfinite(value).all():
                raise RulesError(f"{name} holds numbers that are not finite. Discard this set of rules.")

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file with fingerprint and schema hash; `notes` are kept beside them."""
        own = {"fednl.fingerprint": self.fingerprint, "fednl.schema": self.schema_hash}
        tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in self.tensors.items()}
        Path(path).write_bytes(
            save({n: t.reshape(self.shapes[n]) for n, t in tensors.items()}, {**(notes or {}), **own})
        )


def load_rules(path: str | Path) -> tuple[RuleSet, dict[str, str]]:
    """A rule set from its file, and the notes kept with it.

    Raises:
        RulesError: the file is missing, damaged, or no rule set.
    """
    try:
        with safe_open(path, "np") as file:
            notes = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rules, schema = RuleSet(tensors, notes.pop("fednl.fingerprint")), notes.pop("fednl.schema")
    except (OSError, SafetensorError, KeyError) as error:
        raise RulesError(f"{path} is no set of rules ({error}). Make one with `fednl-runtime rules train`.") from error
    if any(value.dtype != np.float32 for value in tensors.values()) or rules.schema_hash != schema:
        raise RulesError(f"{path} is damaged: its rules and its schema hash differ. Discard it.")
    return rules, notes
