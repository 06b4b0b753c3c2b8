"""What a device sends: a difference of rules in one of four encodings, and six facts about it."""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import uuid
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.tensors import Array, pack, unpack

Shape = tuple[int, ...]
Tensors = Mapping[str, NDArray[np.float32]]
Vector = NDArray[np.float64]

MEDIA_TYPE = "application/vnd.fednl.update+safetensors"
ENCODINGS = ("f32", "f16", "int8", "topk")
FACTS = ("schema", "base_version", "num_tokens", "clip_norm", "sigma", "agent_version")
"""The metadata of an update, all of it."""

KEEP = 0.1
"""Share of the numbers that `topk` sends."""

WHOLE = re.compile(r"0|[1-9][0-9]{0,14}")
DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?")
VERSION = re.compile(r"[0-9A-Za-z.+-]{1,32}")


@dataclasses.dataclass(frozen=True)
class Schema:
    """Which rules a population shares: their shapes by name, and the hash that stands for them on the wire."""

    shapes: Mapping[str, Shape]
    hash: str

    @property
    def names(self) -> list[str]:
        """The names in the order in which vectors hold them."""
        return sorted(self.shapes)

    @property
    def lengths(self) -> list[int]:
        """Numbers in each rule, in the order of `names`."""
        return [math.prod(self.shapes[name]) for name in self.names]

    @property
    def size(self) -> int:
        """Numbers in all rules."""
        return sum(self.lengths)

    def vector(self, tensors: Mapping[str, Array]) -> Vector:
        """All rules one after the other, `[size]` in float64."""
        return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in self.names])

    def tensors(self, vector: Array) -> dict[str, NDArray[np.float32]]:
        """The rules by name from a vector `[size]`, rounded to float32."""
        parts = np.split(np.asarray(vector, np.float32), np.cumsum(self.lengths)[:-1])
        return {name: part.reshape(self.shapes[name]) for name, part in zip(self.names, parts, strict=True)}


@dataclasses.dataclass(frozen=True)
class ClientUpdate:
    """A difference of rules: trained minus base, clipped on the device, with noise of std `sigma` if any."""

    schema: str
    base_version: int
    num_tokens: int
    clip_norm: float
    sigma: float
    agent_version: str
    delta: Tensors

    def facts(self) -> dict[str, str]:
        """The metadata that travel with the difference."""
        return {name: str(getattr(self, name)) for name in FACTS}


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The bytes of an upload, and what they leave out: `delta` = sent + `residual`, exactly.

    A device adds the residual to its next difference (error feedback); it keeps both in one transaction.
    """

    body: bytes
    residual: dict[str, NDArray[np.float32]]


def new_update_id(now: float) -> str:
    """A UUIDv7 (RFC 9562) for an update made at `now`, in seconds since 1970; made once, before the first attempt."""
    random = secrets.randbits(74)
    head = (int(now * 1000) & (1 << 48) - 1) << 80 | 7 << 76 | (random >> 62) << 64
    return str(uuid.UUID(int=head | 2 << 62 | random & (1 << 62) - 1))


def encode(update: ClientUpdate, schema: Schema, encoding: str = "f32", keep: float = KEEP) -> Encoded:
    """An update as a body to upload; `keep` is the share of the numbers that `topk` sends.

    Raises:
        Refusal: a number is not finite, or too large for f16.
    """
    assert encoding in ENCODINGS
    delta = _finite({name: np.asarray(update.delta[name], np.float32) for name in schema.names})
    arrays = _ENCODERS[encoding](delta, schema, keep)
    sent = _decoded(arrays, schema)
    return Encoded(pack(arrays, update.facts()), {name: delta[name] - sent[name] for name in schema.names})


def decode(body: bytes, schema: Schema) -> ClientUpdate:
    """Read an upload of any encoding.

    Raises:
        Refusal: `malformed`, `wrong_schema`, `wrong_names`, `wrong_dtype`, `wrong_shape`, `not_finite`, in this order.
    """
    arrays, metadata = unpack(body)
    facts = _facts(metadata)
    if facts["schema"] != schema.hash:
        raise Refusal("wrong_schema", "The update was made for other rules. Fetch the current rules and train again.")
    return ClientUpdate(
        schema=facts["schema"],
        base_version=int(facts["base_version"]),
        num_tokens=int(facts["num_tokens"]),
        clip_norm=float(facts["clip_norm"]),
        sigma=float(facts["sigma"]),
        agent_version=facts["agent_version"],
        delta=_decoded(arrays, schema),
    )


def _facts(metadata: Mapping[str, str]) -> Mapping[str, str]:
    if sorted(metadata) != sorted(FACTS):
        raise Refusal("malformed", f"The metadata of an update are {', '.join(FACTS)}; send these and no others.")
    forms = {"base_version": WHOLE, "num_tokens": WHOLE, "clip_norm": DECIMAL, "sigma": DECIMAL}
    for name, form in {**forms, "agent_version": VERSION}.items():
        if not form.fullmatch(metadata[name]):
            raise Refusal("malformed", f"{name} is {metadata[name][:40]!r}, which cannot be read. Send a plain number.")
    return metadata


def _f32(delta: Tensors, schema: Schema, keep: float) -> dict[str, Array]:
    return dict(delta)


def _f16(delta: Tensors, schema: Schema, keep: float) -> dict[str, Array]:
    with np.errstate(over="ignore"):  # too large becomes infinite, which is refused
        return {name: value.astype(np.float16) for name, value in delta.items()}


def _int8(delta: Tensors, schema: Schema, keep: float) -> dict[str, Array]:
    levels = {name: _levels(delta[name]) for name in schema.names}
    scale = np.array([levels[name][1] for name in schema.names], np.float32)
    return {**{name: level for name, (level, _) in levels.items()}, "scale": scale}


def _topk(delta: Tensors, schema: Schema, keep: float) -> dict[str, Array]:
    """The largest numbers of all rules in int8, one bit per number that says whether it is sent, a scale per rule."""
    flat = np.concatenate([delta[name].reshape(-1) for name in schema.names])
    chosen = np.zeros(schema.size, bool)
    chosen[np.argsort(-np.abs(flat), kind="stable")[: math.ceil(keep * schema.size)]] = True
    bounds = np.cumsum(schema.lengths)[:-1]
    parts = zip(np.split(flat, bounds), np.split(chosen, bounds), strict=True)
    levels = [_levels(values[mask]) for values, mask in parts]
    scale = np.array([scale for _, scale in levels], np.float32)
    return {"mask": np.packbits(chosen), "values": np.concatenate([level for level, _ in levels]), "scale": scale}


_ENCODERS = {"f32": _f32, "f16": _f16, "int8": _int8, "topk": _topk}


def _levels(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], np.float32]:
    """Whole numbers of -127 to 127 and the float32 step between two of them."""
    step = np.float32(np.abs(values).max(initial=0) / np.float32(127))
    if step == 0:
        return np.zeros(values.shape, np.int8), step
    return np.clip(np.rint(values / step), -127, 127).astype(np.int8), step


def _decoded(arrays: Mapping[str, Array], schema: Schema) -> dict[str, NDArray[np.float32]]:
    """What a body says, as float32 by name, whichever encoding it is in; raises Refusal as `decode` does."""
    return _finite(_from_topk(arrays, schema) if "mask" in arrays else _from_named(arrays, schema))


def _finite(delta: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    if not all(np.isfinite(value).all() for value in delta.values()):
        raise Refusal("not_finite", "The difference holds numbers that are not finite. Discard it and train again.")
    return delta


def _from_named(arrays: Mapping[str, Array], schema: Schema) -> dict[str, NDArray[np.float32]]:
    scaled = "scale" in arrays
    _check_names(arrays, [*schema.names, *["scale"] * scaled])
    types = {arrays[name].dtype for name in schema.names}
    wanted = [np.dtype(np.int8)] if scaled else [np.dtype(np.float32), np.dtype(np.float16)]
    if len(types) != 1 or types.pop() not in wanted or (scaled and arrays["scale"].dtype != np.float32):
        raise Refusal("wrong_dtype", "Send all rules as F32, all as F16, or all as I8 with one F32 scale per rule.")
    shapes = {**schema.shapes, **({"scale": (len(schema.names),)} if scaled else {})}
    _check_shapes(arrays, shapes)
    if not scaled:
        return {name: arrays[name].astype(np.float32) for name in schema.names}
    steps = dict(zip(schema.names, arrays["scale"], strict=True))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by the caller
        return {name: arrays[name].astype(np.float32) * steps[name] for name in schema.names}


def _from_topk(arrays: Mapping[str, Array], schema: Schema) -> dict[str, NDArray[np.float32]]:
    _check_names(arrays, ["mask", "scale", "values"])
    types = {"mask": np.uint8, "scale": np.float32, "values": np.int8}
    if any(arrays[name].dtype != dtype for name, dtype in types.items()):
        raise Refusal("wrong_dtype", "The top-k form has a U8 mask, I8 values and one F32 scale per rule.")
    _check_shapes(arrays, {"mask": (-(-schema.size // 8),), "scale": (len(schema.names),)})
    chosen = np.unpackbits(arrays["mask"]).astype(bool)
    if chosen[schema.size :].any() or arrays["values"].shape != (int(chosen.sum()),):
        raise Refusal("wrong_shape", "The mask and the values differ in number. Encode the update again.")
    flat = np.zeros(schema.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.repeat(arrays["scale"], schema.lengths)[chosen[: schema.size]]
        flat[chosen[: schema.size]] = arrays["values"].astype(np.float32) * steps
    return schema.tensors(flat)


def _check_names(arrays: Mapping[str, Array], wanted: list[str]) -> None:
    if differing := sorted(set(arrays) ^ set(wanted)):
        names = ", ".join(repr(name[:80]) for name in differing[:3])
        raise Refusal(
            "wrong_names", f"The update and the schema differ in {names}. Send exactly the rules of the schema."
        )


def _check_shapes(arrays: Mapping[str, Array], shapes: Mapping[str, Shape]) -> None:
    for name, shape in shapes.items():
        if arrays[name].shape != tuple(shape):
            raise Refusal(
                "wrong_shape", f"{name} is {arrays[name].shape}, not {tuple(shape)}. Send the schema's shapes."
            )
