"""Weight-only quantisation: a model file with int8 or int4 matrices, its memory and its rules untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from fednl_runtime.errors import ModelFileError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.ops import MICROSOFT, Ops
from fednl_runtime.export.weights import TRANSPOSED, Weights, recovered, stored
from fednl_runtime.onnx_backend import load

BLOCK = 32
"""Numbers of a row that share a scale."""
COLUMNS = "embedding.columns"
"""The embedding transposed, `[d, V]`."""
FACTORS = {8: (1.0,), 4: (1.05, 1.0, 0.95, 0.9, 0.85, 0.8)}
"""Scales that are tried, as multiples of the one at which a block's largest number is exact."""
Packed = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix `[N, K]` in blocks of 32 along K: unsigned integers `[N, K / 32, 32 bits / 8]` and scales `[N, K / 32]`.

    A number is scale * (integer - 2^(bits - 1)); two int4 lie in a byte, the first in its lower half.
    """

    values: Packed
    scales: npt.NDArray[np.float32]
    bits: int

    def restore(self) -> npt.NDArray[np.float32]:
        """The matrix `[N, K]` that is stored."""
        values = self.values
        if self.bits == 4:
            values = np.stack([values & 15, values >> 4], -1).reshape(*self.scales.shape, BLOCK)
        numbers = (values.astype(np.float32) - 2 ** (self.bits - 1)) * self.scales[..., None]
        return numbers.reshape(len(numbers), -1)

    def first(self, rows: int) -> Quantized:
        """The first rows."""
        return Quantized(np.ascontiguousarray(self.values[:rows]), np.ascontiguousarray(self.scales[:rows]), self.bits)


def quantize(matrix: npt.NDArray[np.floating], bits: int) -> Quantized:
    """Round `[N, K]` to the nearest of 2^bits levels in blocks of 32, each with the scale of least square error."""
    blocks = np.asarray(matrix, np.float32).reshape(len(matrix), -1, BLOCK)
    half = 2 ** (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    full = np.where(largest == 0, 1, largest / -half)  # the largest number of a block is exact: it gets the level -half
    best, scales = np.full(full.shape, np.inf), full
    for factor in FACTORS[bits]:
        scale = full * factor
        rounded = np.clip(np.round(blocks / scale), -half, half - 1) * scale
        error = np.square(rounded - blocks).sum(-1, keepdims=True)
        best, scales = np.minimum(best, error), np.where(error < best, scale, scales)
    values = (np.clip(np.round(blocks / scales), -half, half - 1) + half).astype(np.uint8)
    if bits == 4:
        values = values[..., 0::2] | values[..., 1::2] << 4
    return Quantized(values, scales[..., 0].astype(np.float32), bits)


def quantize_tiles(matrix: npt.NDArray[np.floating]) -> tuple[Quantized, Quantized]:
    """Round `[N, K]` to 8 bits in tiles of 32 by 32 with one scale each; the same numbers by rows and by columns."""
    rows, columns = (-size % BLOCK for size in matrix.shape)
    padded = np.pad(np.asarray(matrix, np.float32), ((0, rows), (0, columns)))
    tiles = padded.reshape(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    largest = np.abs(tiles).max((1, 3), keepdims=True)
    scales = np.where(largest == 0, 1, largest / 127).astype(np.float32)
    values = (np.round(tiles / scales) + 128).astype(np.uint8)
    wide = np.repeat(scales[:, 0, :, 0], BLOCK, axis=0)
    by_rows = Quantized(values.reshape(len(padded), -1, BLOCK), wide, 8)
    values = values.transpose(2, 3, 0, 1).reshape(padded.shape[1], -1, BLOCK)
    wide = np.repeat(scales[:, 0, :, 0].T, BLOCK, axis=0)
    by_columns = Quantized(values, wide, 8)
    return by_rows.first(matrix.shape[0]), by_columns.first(matrix.shape[1])


def quantized(weights: Weights, bits: int) -> dict[str, Quantized]:
    """The matrices of `weights` that a quantised file stores so: the linear maps, as `[out, in]`, and the embedding.

    The embedding keeps 8 bits, and is stored by columns too where a top level learns: its gradient multiplies from
    the other side, by the same numbers.
    """
    found = {n: quantize(v.T, bits) for n, v in weights.items() if is_linear(n) and len(v) % BLOCK == 0}
    if weights["embedding"].shape[1] % BLOCK == 0:
        found["embedding"], columns = quantize_tiles(weights["embedding"])
        if "rule.top.p" in weights:
            found[COLUMNS] = columns
    return found


def is_linear(name: str) -> bool:
    """Whether the stored tensor `name` `[in, out]` is a linear map that is read by matrix products alone."""
    return any(part in TRANSPOSED for part in name.split("."))


def file_parameters(path: str | Path) -> Weights:
    """The parameters that a model file stands for, fp32, by their own names."""
    initializers = onnx.load(path).graph.initializer
    own = (tensor for tensor in initializers if not tensor.name.startswith("const."))
    return recovered(restored({tensor.name: numpy_helper.to_array(tensor) for tensor in own}))


def with_exact_activations(source: Path, target: Path) -> None:
    """Write a quantised file so that it rounds no activations: slower, and exactly what its weights say."""
    model = onnx.load(source)
    for attribute in attributes_of(model.graph):
        if attribute.name == "accuracy_level":
            attribute.i = 1  # fp32
    onnx.save(model, target)


def attributes_of(graph: onnx.GraphProto) -> Iterator[onnx.AttributeProto]:
    """Every attribute of a graph's nodes and of those in their branches."""
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute
            yield from attributes_of(attribute.g)


def restored(initializers: Mapping[str, npt.NDArray[np.generic]]) -> Weights:
    """The inverse of storing: every tensor by its own name, quantised matrices as the numbers they stand for."""
    weights: Weights = {}
    for name, value in initializers.items():
        own, _, suffix = name.partition(":")
        if suffix == "scale" and own != COLUMNS:
            values = initializers[f"{own}:q"].astype(np.uint8)
            bits = 8 * values.shape[-1] // BLOCK
            matrix = Quantized(values, value.astype(np.float32), bits).restore()
            weights[own] = matrix if own == "embedding" else matrix.T
        elif not suffix:
            weights[name] = value.astype(np.float32)
    return weights


class QuantizedOps(Ops):
    """Operators that multiply by quantised matrices; everything else is computed in fp32 as ever."""

    def __init__(self, matrices: Mapping[str, Quantized], parent: Ops | None = None) -> None:
        super().__init__(portable=False, parent=parent)
        self._matrices = matrices

    def branch(self) -> QuantizedOps:
        """A builder of a subgraph, which shares names and initializers with this one."""
        return QuantizedOps(self._matrices, self)

    def weight(self, name: str, value: npt.NDArray[np.floating], rule: bool = False) -> None:
        """A stored tensor; a quantised one is read by `linear`, `embed`, `unembed` and `mix`."""
        if name not in self._matrices:
            super().weight(name, value, rule)
            return
        for stored_name in (name, *(COLUMNS,) * (name == "embedding" and COLUMNS in self._matrices)):
            matrix = self._matrices[stored_name]
            for suffix, array in (("q", matrix.values), ("scale", matrix.scales)):
                self.initializers[f"{stored_name}:{suffix}"] = numpy_helper.from_array(array, f"{stored_name}:{suffix}")

    def linear(self, x: str, name: str, out: str | None = None) -> str:
        """x `[..., in]` times the stored matrix `name`."""
        if name not in self._matrices:
            return super().linear(x, name, out)
        matrix = self._matrices[name]
        size = len(self._matrices["embedding"].scales) if name == COLUMNS else matrix.scales.shape[1] * BLOCK
        attributes: dict[str, Any] = {"N": len(matrix.scales), "K": size, "bits": matrix.bits, "block_size": BLOCK}
        inputs = (x, f"{name}:q", f"{name}:scale")
        return self("MatMulNBits", *inputs, out=out, domain=MICROSOFT, accuracy_level=4, **attributes)

    def embed(self, tokens: str) -> str:
        """Rows of the embedding `[B, T, d]`."""
        if "embedding" not in self._matrices:
            return super().embed(tokens)
        matrix = self._matrices["embedding"]
        flat = self.reshape("embedding:q", len(matrix.scales), -1)
        attributes: dict[str, Any] = {"bits": matrix.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return self("GatherBlockQuantized", flat, tokens, "embedding:scale", domain=MICROSOFT, **attributes)

    def unembed(self, h: str, out: str | None = None) -> str:
        """Logits h E^T."""
        return super().unembed(h, out) if "embedding" not in self._matrices else self.linear(h, "embedding", out)

    def mix(self, x: str) -> str:
        """x E: rows of the embedding, added up with the weights x `[..., V]`."""
        return super().mix(x) if "embedding" not in self._matrices else self.linear(x, COLUMNS)


def quantize_file(source: Path, target: Path, bits: int) -> None:
    """Write the model file `source` again with its matrices in 8 or 4 bits.

    The file stands for the rounded weights: its fingerprint is theirs, and sessions of `source` are not its own.

    Raises:
        ModelFileError: `source` is not a model file, or has matrices whose rows are no multiple of 32.
    """
    model = load(source, threads=1).model
    params = file_parameters(source)
    matrices = quantized(stored(params), bits)
    if "embedding" not in matrices:
        raise ModelFileError(f"{source}: rows of {model.config.d_model} numbers do not fit blocks of {BLOCK}.")
    held = {name: value.restore() for name, value in matrices.items() if name != COLUMNS}
    rounded = {**stored(params), **{n: v if n == "embedding" else v.T for n, v in held.items()}}
    metadata = {f"fednl.{key}": value for key, value in model.metadata.items()} | {"fednl.quantization": f"int{bits}"}
    ops = QuantizedOps(matrices)
    export_model(recovered(rounded), model.config, model.tokenizer_json, target, ops, model.name, metadata)
