"""Weight-only quantisation: a model file with int8 or int4 matrices, its memory and its rules untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

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


def quantized(weights: Weights, bits: int) -> dict[str, Quantized]:
    """The matrices of `weights` that a quantised file stores so: the linear maps, as `[out, in]`, and the embedding."""
    found = {}
    for name, value in weights.items():
        if name == "embedding" or is_linear(name):
            matrix = value if name == "embedding" else value.T
            if matrix.shape[1] % BLOCK == 0:
                found[name] = quantize(matrix, bits)
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
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1  # fp32
    onnx.save(model, target)


def restored(initializers: Mapping[str, npt.NDArray[np.generic]]) -> Weights:
    """The inverse of storing: every tensor by its own name, quantised matrices as the numbers they stand for."""
    weights: Weights = {}
    for name, value in initializers.items():
        own, _, suffix = name.partition(":")
        if suffix == "scale":
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
        """A stored tensor; a quantised one is read by `linear`, `embed` and `unembed`."""
        if name not in self._matrices:
            super().weight(name, value, rule)
            return
        matrix = self._matrices[name]
        for suffix, array in (("q", matrix.values), ("scale", matrix.scales)):
            self.initializers[f"{name}:{suffix}"] = numpy_helper.from_array(array, f"{name}:{suffix}")
        if name == "embedding":
            self._restored(name, matrix)

    def linear(self, x: str, name: str, out: str | None = None) -> str:
        """x `[..., in]` times the stored matrix `name`."""
        if name not in self._matrices:
            return super().linear(x, name, out)
        n, blocks = self._matrices[name].scales.shape
        attributes = {"N": n, "K": blocks * BLOCK, "bits": self._matrices[name].bits, "block_size": BLOCK}
        inputs = (x, f"{name}:q", f"{name}:scale")
        return self("MatMulNBits", *inputs, out=out, domain=MICROSOFT, accuracy_level=4, **attributes)

    def embed(self, tokens: str) -> str:
        """Rows of the embedding `[B, T, d]`."""
        return super().embed(tokens) if "embedding" not in self._matrices else self._rows("embedding", tokens)

    def unembed(self, h: str, out: str) -> str:
        """Logits h E^T."""
        return super().unembed(h, out) if "embedding" not in self._matrices else self.linear(h, "embedding", out)

    def _rows(self, name: str, indices: str, out: str | None = None) -> str:
        """Rows of a quantised matrix as numbers."""
        matrix = self._matrices[name]
        flat = self.reshape(f"{name}:q", len(matrix.scales), -1)
        attributes = {"bits": matrix.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        inputs = (flat, indices, f"{name}:scale")
        return self("GatherBlockQuantized", *inputs, out=out, domain=MICROSOFT, **attributes)

    def _restored(self, name: str, matrix: Quantized) -> None:
        """`{name}:f32` for whoever needs the numbers, as the top level's gradient does."""
        first, rows, step = (self.const(n, np.int64) for n in (0, len(matrix.scales), 1))
        self._rows(name, self("Range", first, rows, step), out=f"{name}:f32")


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
    held = {name: value.restore() for name, value in matrices.items()}
    rounded = {**stored(params), **{n: v if n == "embedding" else v.T for n, v in held.items()}}
    metadata = {f"fednl.{key}": value for key, value in model.metadata.items()} | {"fednl.quantization": f"int{bits}"}
    ops = QuantizedOps(matrices)
    export_model(recovered(rounded), model.config, model.tokenizer_json, target, ops, model.name, metadata)
