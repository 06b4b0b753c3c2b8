"""A small graph builder: the operators of the model, fused for onnxruntime or in standard ONNX."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from fednl_runtime.export.weights import fits_float16

Dim = int | str
MICROSOFT = "com.microsoft"
NEVER = -1e4
"""A log retention whose exponential is exactly 0."""


def typed(name: str, shape: Sequence[Dim] | None = None, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    """A graph input or output; without a shape its rank is open too."""
    return helper.make_tensor_value_info(name, kind, shape)


class Ops:
    """Nodes and initializers of a graph under construction; values are their names."""

    def __init__(self, portable: bool, parent: Ops | None = None) -> None:
        self.portable = portable
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = parent.initializers if parent else {}
        self._names: Iterator[int] = parent._names if parent else itertools.count()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = parent._constants if parent else {}

    def branch(self) -> Ops:
        """A builder of a subgraph, which shares names and initializers with this one."""
        return Ops(self.portable, self)

    def many(
        self, op: str, *inputs: str, outputs: int | Sequence[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node; `outputs` are their names or how many there are."""
        names = [f"v{next(self._names)}" for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names

    def __call__(self, op: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output and return it."""
        return self.many(op, *inputs, outputs=[out] if out else 1, domain=domain, **attributes)[0]

    def const(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> str:
        """A constant, stored once however often it is used."""
        array = np.asarray(value, dtype)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"const.{len(self._constants)}"
            self.initializers[self._constants[key]] = numpy_helper.from_array(array, self._constants[key])
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A one-dimensional int64 constant."""
        return self.const(values, np.int64)

    def weight(self, name: str, value: npt.NDArray[np.floating], rule: bool = False) -> None:
        """A stored tensor, read as `{name}:f32`; half the bytes when every number is a float16.

        A rule stays fp32 and is read by its own name, so that it can be an input with a default.
        """
        half = not rule and fits_float16(value)
        self.initializers[name] = numpy_helper.from_array(value.astype(np.float16) if half else value, name)
        if not rule:
            self("Cast", name, to=TensorProto.FLOAT, out=f"{name}:f32")

    def linear(self, x: str, name: str, out: str | None = None) -> str:
        """x `[..., in]` times the stored matrix `name` `[in, out]`."""
        return self("MatMul", x, f"{name}:f32", out=out)

    def embed(self, tokens: str) -> str:
        """Rows of the embedding `[B, T, d]`."""
        return self("Gather", "embedding:f32", tokens)

    def unembed(self, h: str, out: str | None = None) -> str:
        """Logits h E^T."""
        return self.product(h, "embedding:f32", 2, trans_y=True, out=out)

    def mix(self, x: str) -> str:
        """x E: rows of the embedding, added up with the weights x `[..., V]`."""
        return self("MatMul", x, "embedding:f32")

    def reshape(self, x: str, *shape: int) -> str:
        """x with another shape; 0 keeps an axis, -1 is what remains."""
        return self("Reshape", x, self.ints(*shape))

    def split(self, x: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        """Pieces of x along `axis`."""
        return self.many("Split", x, self.ints(*sizes), outputs=len(sizes), axis=axis)

    def tail(self, x: str, length: int, axis: int, out: str) -> str:
        """The last `length` entries of `axis`."""
        end = np.iinfo(np.int64).max
        return self("Slice", x, self.ints(-length), self.ints(end), self.ints(axis), out=out)

    def silu(self, x: str) -> str:
        """x sigmoid(x)."""
        if self.portable:
            return self("Mul", x, self("Sigmoid", x))
        return self("QuickGelu", x, domain=MICROSOFT, alpha=1.0)

    def rms(self, x: str, gain: str, eps: float) -> str:
        """RMSNorm over the last axis."""
        return self("RMSNormalization", x, gain, axis=-1, epsilon=eps)

    def add_rms(self, x: str, y: str, gain: str, eps: float) -> tuple[str, str]:
        """RMSNorm of x + y `[B, T, d]`, and the sum itself."""
        if self.portable:
            total = self("Add", x, y)
            return self.rms(total, gain, eps), total
        total = f"v{next(self._names)}"
        outputs = [f"v{next(self._names)}", "", "", total]
        self.many("SkipSimplifiedLayerNormalization", x, y, gain, outputs=outputs, domain=MICROSOFT, epsilon=eps)
        return outputs[0], total

    def unit(self, x: str, width: int, eps: float) -> str:
        """x / sqrt(|x|^2 + eps) over a last axis of `width`, as an RMSNorm."""
        return self.rms(x, self.const(np.full(width, width**-0.5)), eps / width)

    def clip_norm(self, x: str, limit: float) -> str:
        """x scaled so that its last axis has at most norm `limit`."""
        norm = self("Max", self("ReduceL2", x, self.ints(-1), keepdims=1), self.const(limit))
        clipped = self("Div", x, norm)
        return clipped if limit == 1 else self("Mul", clipped, self.const(limit))

    def product(
        self, x: str, y: str, rank: int, trans_x: bool = False, trans_y: bool = False, out: str | None = None
    ) -> str:
        """Matrix product of the last two axes; a transposed operand has `rank` axes."""
        if not self.portable:
            return self("FusedMatMul", x, y, domain=MICROSOFT, transA=int(trans_x), transB=int(trans_y), out=out)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        x, y = (self("Transpose", v, perm=perm) if t else v for v, t in ((x, trans_x), (y, trans_y)))
        return self("MatMul", x, y, out=out)

    def conv(self, u: str, taps: str, state: str, window: int) -> str:
        """Depthwise causal convolution: u `[B, T, C]`, taps `[C, K]`, the state tensor `[B, K-1, C]`."""
        past, present = f"past.{state}", f"present.{state}"
        if not self.portable:
            outputs = [f"v{next(self._names)}", present]
            inputs = (u, self("Unsqueeze", taps, self.ints(1)), "", past)
            self.many("CausalConvWithState", *inputs, outputs=outputs, domain=MICROSOFT, ndim=1, channels_last=1)
            return outputs[0]
        steps = self("Concat", past, u, axis=1)
        self.tail(steps, window - 1, 1, present)
        total = ""
        for j, tap in enumerate(self.split(self("Transpose", taps, perm=[1, 0]), [1] * window, 0)):
            end = j - window + 1 or np.iinfo(np.int64).max
            term = self("Mul", self("Slice", steps, self.ints(j), self.ints(end), self.ints(1)), tap)
            total = self("Add", total, term) if total else term
        return total

    def recurrence(self, q: str, k: str, v: str, gates: Sequence[str], state: str, shape: tuple[int, int, int]) -> str:
        """S <- e^g S + beta k (v - e^g S^T k)^T, or e^g S + k v^T without beta; o = S^T q after the write.

        q, k `[B, T, H K]`, v `[B, T, H V]`, gates (g, beta) or (g,) `[B, T, H]`; S is the state tensor
        `[B, H, K, V]` and `shape` (H, K, V). Returns o `[B, T, H V]`.
        """
        past, present = f"past.{state}", f"present.{state}"
        if self.portable:
            body = self._scan_body(len(gates) == 2, shape)
            inputs = (q, k, v, *gates)
            axes: dict[str, Any] = {"scan_input_axes": [1] * len(inputs), "scan_output_axes": [1]}
            axes["num_scan_inputs"] = len(inputs)
            return self.many("Scan", past, *inputs, outputs=[present, f"{present}:read"], body=body, **axes)[1]
        attributes: dict[str, Any] = {"q_num_heads": shape[0], "kv_num_heads": shape[0], "scale": 1.0}
        attributes["update_rule"] = ("gated", "gated_delta")[len(gates) - 1]
        outputs = [f"v{next(self._names)}", present]
        self.many("LinearAttention", q, k, v, past, *gates, outputs=outputs, domain=MICROSOFT, **attributes)
        return outputs[0]

    def _scan_body(self, beta: bool, shape: tuple[int, int, int]) -> GraphProto:
        """One token of `recurrence`."""
        heads, rows, columns = shape
        body = self.branch()
        key, value = body.reshape("k", 0, heads, 1, rows), body.reshape("v", 0, heads, 1, columns)
        state = body("Mul", body("Exp", body.reshape("g", 0, heads, 1, 1)), "s")
        if beta:
            error = body("Sub", value, body("MatMul", key, state))
            value = body("Mul", body.reshape("b", 0, heads, 1, 1), error)
        state = body("Add", state, body("Mul", body.reshape(key, 0, heads, rows, 1), value))
        read = body.reshape(body("MatMul", body.reshape("q", 0, heads, 1, rows), state), 0, heads * columns)
        inputs = [typed("s", ("B", *shape)), *(typed(name) for name in "qkvgb"[: 4 + beta])]
        return body.graph("token", inputs, [typed(state, ("B", *shape)), typed(read, ("B", heads * columns))])

    def graph(self, name: str, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
        """The nodes so far as a subgraph; its constants stay in the outermost graph."""
        return helper.make_graph(self.nodes, name, inputs, outputs)
