"""Parameters as a graph stores them, and back: names, transposes, float16, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fednl_runtime.config import HopeConfig

Weights = dict[str, npt.NDArray[np.floating]]
RULES = ("conv", "r_eta", "b_eta", "r_alpha", "b_alpha", "cms_step", "cms_decay")
"""Parameters of a layer that are inputs of the graph, with stored defaults."""

TRANSPOSED = ("w_in", "w_out", "cms_in", "cms_out")
"""Matrices stored `[in, out]`, as MatMul reads them."""

SCALARS = ("top.step", "top.decay")
"""Parameters without an axis, which some formats keep as one of length 1."""

PER_LEVEL = ("cms_norm", "cms_in", "cms_out")
"""Parameters stored as one tensor for each CMS level."""


def rule_name(name: str) -> str | None:
    """The graph input of parameter `name`, None when it is not a rule."""
    scope, _, leaf = name.rpartition(".")
    if scope.startswith("layers.") and leaf in RULES:
        return f"rule.{scope.removeprefix('layers.')}.{leaf}"
    return f"rule.{name}" if scope == "top" else None


def stored(params: Mapping[str, npt.NDArray[np.floating]]) -> Weights:
    """The initializers that hold `params`, fp32, by graph name."""
    out: Weights = {}
    for name, value in params.items():
        leaf = name.rpartition(".")[2]
        value = np.asarray(value, np.float32)
        if leaf in TRANSPOSED:
            value = value.swapaxes(-1, -2)
        if name in SCALARS:
            value = value.reshape(())
        levels = {f"{name}.{i}": part for i, part in enumerate(value)} if leaf in PER_LEVEL else {}
        out |= levels or {rule_name(name) or name: value}
    return {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in out.items()}


def recovered(initializers: Mapping[str, npt.NDArray[np.floating]]) -> Weights:
    """The inverse of `stored`: parameters in fp32 by their own names."""
    out: Weights = {}
    levels: dict[str, list[npt.NDArray[np.floating]]] = {}
    for name, value in initializers.items():
        own = name.removeprefix("rule.") if name.startswith("rule.top.") else name.replace("rule.", "layers.", 1)
        parent, _, level = own.rpartition(".")
        leaf = parent.rpartition(".")[2] if level.isdigit() else level
        value = np.asarray(value, np.float32)
        value = value.swapaxes(-1, -2) if leaf in TRANSPOSED else value
        if level.isdigit():
            levels.setdefault(parent, []).append(value)
        else:
            out[own] = value
    return out | {name: np.stack(parts) for name, parts in levels.items()}


def fits_float16(value: npt.NDArray[np.floating]) -> bool:
    """Whether every number of `value` is exactly a float16."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(value.astype(np.float16).astype(value.dtype), value))


def fingerprint(params: Mapping[str, npt.NDArray[np.floating]], config: HopeConfig) -> str:
    """SHA-256 over the configuration and all weights in fp32; how a file stores them does not matter."""
    digest = hashlib.sha256(config.to_json().encode())
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(params[name], "<f4").tobytes())
    return digest.hexdigest()
