"""Weight-only quantisation: a model file with int8 or int4 matrices, its memory and its rules untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from fednl_runtime.errors import ModelFileError
from fednl_runtime.export.graph import export_model, write
from fednl_runtime.export.integers import Integers, integers, linear, mix
from fednl_runtime.export.ops import MICROSOFT, Ops
from fednl_runtime.export.weights import TRANSPOSED, Weights, recovered, stored
from fednl_runtime.onnx_backend import load

BLOCK = 32
"""Numbers of a row that share a scale."""
HALF = 8
"""What the integers of a block are less by than they are stored."""
FACTORS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried, as multiples of the one at which a block's largest number is exact."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix `[K, N]` in 4 bits, in blocks of 32 along K: bytes `[N, K / 32, 16]` and scales `[N, K / 32]`.

    Two integers lie in a byte, the first in its lower half; a number is scale * (integer - 8).
    """

    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]

    def restore(self) -> npt.NDArray[np.float32]:
        """The matrix `[K, N]` that is stored."""
        values = np.stack([self.values & 15, self.values >> 4], -1).reshape(*self.scales.shape, BLOCK)
        numbers = (values.astype(np.float32) - HALF) * self.scales[..., None]
        return numbers.reshape(len(numbers), -1).T


Matrix = Blocks | Integers


def blocks(matrix: npt.NDArray[np.floating]) -> Blocks:
    """Round `[K, N]` to the nearest of 16 levels in blocks of 32, each with the scale of least square error."""
    parts = np.asarray(matrix.T, np.float32).reshape(matrix.shape[1], -1, BLOCK)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)
    full = np.where(largest == 0, 1, largest / -HALF)  # the largest number is exact at factor 1: it gets the level -8
    best, scales = np.full(full.shape, np.inf), full
    for factor in FACTORS:
        scale = full * factor
        error = np.square(nearest(parts / scale) * scale - parts).sum(-1, keepdims=True)
        best, scales = np.minimum(best, error), np.where(error < best, scale, scales)
    values = (nearest(parts / scales) + HALF).astype(np.uint8)
    return Blocks((values[..., 0::2] | values[..., 1::2] << 4).astype(np.uint8), scales[..., 0].astype(np.float32))


def nearest(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """The nearest of the 16 levels."""
    return np.clip(np.round(values), -HALF, HALF - 1)


def quantized(weights: Weights, bits: int) -> dict[str, Matrix]:
    """The matrices of `weights` that a quantised file stores so: the linear maps `[in, out]`, and the embedding.

    The embedding keeps 8 bits. It has one scale a token, which both its products can use: that of the logits for
    their columns, that of the top level's gradient for the probabilities that it multiplies.
    """
    found: dict[str, Matrix] = {
        name: integers(value, 0) if bits == 8 else blocks(value)
        for name, value in weights.items()
        if is_linear(name) and len(value) % BLOCK == 0
    }
    if weights["embedding"].shape[1] % BLOCK == 0:
        found["embedding"] = integers(weights["embedding"], 1)
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
    make_exact(model.graph)
    write(model, target)


def make_exact(graph: onnx.GraphProto) -> None:
    """Let the nodes of a graph and of its branches compute with activations as they are."""
    nodes = [part for node in graph.node for part in exact(node)]
    graph.ClearField("node")
    graph.node.extend(nodes)
    for branch in (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")):
        make_exact(branch)


def exact(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """What a node stands for where nothing is rounded: bytes become the numbers that they are rounded from."""
    if node.op_type in PLAIN:
        return [helper.make_node(PLAIN[node.op_type], node.input[:2], node.output)]
    if node.op_type == "MatMulIntegerToFloat":
        x, matrix, step, scales = node.input[:4]
        wide, sums, steps = (f"{node.output[0]}:{part}" for part in ("wide", "sums", "steps"))
        return [
            helper.make_node("Cast", [matrix], [wide], to=TensorProto.FLOAT),
            helper.make_node("MatMul", [x, wide], [sums]),
            helper.make_node("Mul", [step, scales], [steps]),
            helper.make_node("Mul", [sums, steps], node.output),
        ]
    for attribute in node.attribute:
        if attribute.name == "accuracy_level":
            attribute.i = 1  # fp32
    return [node]


PLAIN = {"QuantizeLinear": "Div", "DequantizeLinear": "Mul"}
"""What rounding is but for the rounding and the zero point."""


def restored(initializers: Mapping[str, npt.NDArray[np.generic]]) -> Weights:
    """The inverse of storing: every tensor by its own name, quantised matrices as the numbers they stand for."""
    weights: Weights = {}
    for name, value in initializers.items():
        own, _, suffix = name.partition(":")
        if suffix == "scale":
            values, scales = initializers[f"{own}:q"], value.astype(np.float32)
            blocks = values.dtype == np.uint8
            stored = Blocks(values.astype(np.uint8), scales) if blocks else Integers(values.astype(np.int8), scales)
            weights[own] = stored.restore()
        elif not suffix:
            weights[name] = value.astype(np.float32)
    return weights


class QuantizedOps(Ops):
    """Operators that multiply by quantised matrices; everything else is computed in fp32 as ever."""

    def __init__(self, matrices: Mapping[str, Matrix], parent: Ops | None = None) -> None:
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
        matrix = self._matrices[name]
        for suffix, array in (("q", matrix.values), ("scale", matrix.scales)):
            self.initializers[f"{name}:{suffix}"] = numpy_helper.from_array(array, f"{name}:{suffix}")
        if isinstance(matrix, Integers):
            self("Reshape", f"{name}:scale", self.ints(-1), out=f"{name}:scales")
        if name == "embedding":
            self("Transpose", "embedding:q", perm=[1, 0], out="embedding:columns")  # once, when the file is loaded

    def linear(self, x: str, name: str, out: str | None = None) -> str:
        """x `[..., in]` times the stored matrix `name`."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return super().linear(x, name, out)
        if isinstance(matrix, Integers):
            return linear(self, x, f"{name}:q", f"{name}:scales", out)
        sizes = {"N": len(matrix.scales), "K": matrix.scales.shape[1] * BLOCK, "bits": 4, "block_size": BLOCK}
        inputs = (x, f"{name}:q", f"{name}:scale")
        return self("MatMulNBits", *inputs, out=out, domain=MICROSOFT, accuracy_level=4, **sizes)

    def embed(self, tokens: str) -> str:
        """Rows of the embedding `[B, T, d]`."""
        if "embedding" not in self._matrices:
            return super().embed(tokens)
        rows = self("Cast", self("Gather", "embedding:q", tokens), to=TensorProto.FLOAT)
        return self("Mul", rows, self("Gather", "embedding:scale", tokens))

    def unembed(self, h: str, out: str | None = None) -> str:
        """Logits h E^T."""
        if "embedding" not in self._matrices:
            return super().unembed(h, out)
        return linear(self, h, "embedding:columns", "embedding:scales", out)

    def mix(self, x: str) -> str:
        """x E: rows of the embedding, added up with the weights x `[..., V]`."""
        return super().mix(x) if "embedding" not in self._matrices else mix(self, x, "embedding:q", "embedding:scales")


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
    rounded = {**stored(params), **{name: matrix.restore() for name, matrix in matrices.items()}}
    metadata = {f"fednl.{key}": value for key, value in model.metadata.items()} | {"fednl.quantization": f"int{bits}"}
    ops = QuantizedOps(matrices)
    export_model(recovered(rounded), model.config, model.tokenizer_json, target, ops, model.name, metadata)
