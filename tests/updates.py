"""A small schema, updates to it, and bodies that a hostile device might send."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from fednl_runtime.fed_sync.aggregate import Member
from fednl_runtime.fed_sync.tensors import pack
from fednl_runtime.fed_sync.update import ClientUpdate, Schema, encode
from fednl_runtime.rules import RuleSet

SHAPES = {"rule.0.conv": (5, 3), "rule.0.b_eta": (7,), "rule.top.decay": (), "rule.top.p": (3, 11)}
RULES = RuleSet({name: np.full(shape, 0.25, np.float32) for name, shape in SHAPES.items()}, "f" * 64)
SCHEMA = Schema(RULES.shapes, RULES.schema_hash)


def update_of(seed: int = 0, size: float = 0.01, **facts: Any) -> ClientUpdate:
    """A random difference whose numbers are about `size`."""
    rng = np.random.default_rng(seed)
    delta = SCHEMA.tensors(size * rng.standard_normal(SCHEMA.size))
    known = {"base_version": 1, "num_tokens": 100, "clip_norm": 1.0, "sigma": 0.0, "agent_version": "0.1.0"}
    return ClientUpdate(**{"schema": SCHEMA.hash, **known, "delta": delta, **facts})


def one_hot(index: int, value: float = 1.0, **facts: Any) -> ClientUpdate:
    """A difference that is zero but for one number."""
    vector = np.zeros(SCHEMA.size)
    vector[index] = value
    return update_of(**facts, delta=SCHEMA.tensors(vector))


def body_of(update: ClientUpdate, encoding: str = "f32") -> bytes:
    return encode(update, SCHEMA, encoding).body


def changed(arrays: dict[str, Any] | None = None, without: str = "", **facts: str) -> bytes:
    """A good body with arrays or facts replaced; a fact that is None is left out."""
    update = update_of()
    tensors = {**update.delta, **(arrays or {})}
    tensors.pop(without, None)
    metadata = {name: value for name, value in {**update.facts(), **facts}.items() if value is not None}
    return pack(tensors, metadata)


def members(n: int, seed: int = 0, size: int = 13, spread: float = 0.1, tokens: int = 100) -> list[Member]:
    """Honest members of a round, around a common difference."""
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal(size) / (2 * math.sqrt(size))
    deltas = centre + spread * rng.standard_normal((n, size)) / math.sqrt(size)
    return [Member(f"{i:03}", delta, tokens) for i, delta in enumerate(deltas)]


def liars(n: int, size: int = 13, value: float = -1e30) -> list[Member]:
    """Members that say one huge number everywhere and claim to have read the world."""
    return [Member(f"x{i}", np.full(size, value), 10**9) for i in range(n)]


def file_of(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


NUMBERS = np.zeros(7, np.float32)
LONG = {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}
GOOD = body_of(update_of())
HOSTILE: dict[str, tuple[str, bytes]] = {
    "empty": ("malformed", b""),
    "short": ("malformed", b"\0\0\0"),
    "pickle": ("malformed", b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "cut": ("malformed", GOOD[:-1]),
    "longer": ("malformed", GOOD + b"\0"),
    "header beyond the file": ("malformed", (1 << 62).to_bytes(8, "little") + GOOD[8:]),
    "header of no JSON": ("malformed", file_of(b"{nonsense")),
    "header of a list": ("malformed", file_of([1, 2])),
    "nested deeply": ("malformed", file_of(b'{"a":' * 5000 + b"1" + b"}" * 5000)),
    "one name twice": ("malformed", file_of(b'{"a":%s,"a":%s}' % ((json.dumps(LONG).encode(),) * 2), b"\0" * 28)),
    "overlapping": ("malformed", file_of({"a": LONG, "b": LONG}, b"\0" * 28)),
    "negative shape": ("malformed", file_of({"a": {**LONG, "shape": [-7]}}, b"\0" * 28)),
    "huge shape": ("malformed", file_of({"a": {**LONG, "shape": [1 << 40, 1 << 40]}}, b"\0" * 28)),
    "shape of other bytes": ("malformed", file_of({"a": {**LONG, "shape": [8]}}, b"\0" * 28)),
    "unknown type": ("malformed", file_of({"a": {**LONG, "dtype": "F1000"}}, b"\0" * 28)),
    "complex numbers": ("wrong_dtype", file_of({"a": {**LONG, "dtype": "C64", "data_offsets": [0, 56]}}, b"\0" * 56)),
    "no metadata": ("malformed", pack(update_of().delta, {})),
    "a fact missing": ("malformed", changed(num_tokens=None)),
    "a fact too many": ("malformed", changed(city="Paris")),
    "a negative count": ("malformed", changed(num_tokens="-9")),
    "a count of digits elsewhere": ("malformed", changed(num_tokens="\u0661")),
    "a count with a point": ("malformed", changed(num_tokens="9.0")),
    "a clip norm that is no number": ("malformed", changed(clip_norm="nan")),
    "an agent with a message": ("malformed", changed(agent_version="hello, I am Anna")),
    "another schema": ("wrong_schema", changed(schema="0" * 64)),
    "a rule missing": ("wrong_names", changed(without="rule.top.p")),
    "a rule too many": ("wrong_names", changed({"rule.9.conv": NUMBERS})),
    "whole numbers": ("wrong_dtype", changed({"rule.0.b_eta": NUMBERS.astype(np.int8)})),
    "float64": ("wrong_dtype", changed({"rule.0.b_eta": NUMBERS.astype(np.float64)})),
    "two types": ("wrong_dtype", changed({"rule.0.b_eta": NUMBERS.astype(np.float16)})),
    "one number to be broadcast": ("wrong_shape", changed({"rule.0.b_eta": np.zeros(1, np.float32)})),
    "an empty rule": ("wrong_shape", changed({"rule.0.b_eta": np.zeros(0, np.float32)})),
    "a shape turned": ("wrong_shape", changed({"rule.0.conv": np.zeros((3, 5), np.float32)})),
    "a scalar with a dimension": ("wrong_shape", changed({"rule.top.decay": np.zeros(1, np.float32)})),
    "a number that is none": ("not_finite", changed({"rule.0.b_eta": np.full(7, np.nan, np.float32)})),
    "infinity": ("not_finite", changed({"rule.0.b_eta": np.full(7, -np.inf, np.float32)})),
}
"""What is wrong, the code it gets, and the body."""
