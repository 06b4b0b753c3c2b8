"""Reverse-mode differentiation of graph nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from onnx import NodeProto

from fednl_runtime.export.ops import Ops
from fednl_runtime.export.pullbacks import PULLBACKS, Shape, Tape


def backward(
    ops: Ops, nodes: Sequence[NodeProto], shapes: Mapping[str, Shape], seeds: Mapping[str, str], wanted: Iterable[str]
) -> dict[str, str]:
    """Add the gradient nodes of `nodes` to `ops`: the gradient of each of `wanted`, "" where it is zero.

    `seeds` are gradients of values that the nodes compute; `shapes` must hold every value's shape.
    """
    wanted, tape = list(wanted), Tape(ops, shapes)
    varying = set(wanted)
    for node in nodes:
        if varying & set(node.input):
            assert node.op_type in PULLBACKS, f"{node.op_type} has no gradient"
            varying |= set(node.output)
    gradients = {name: [seed] for name, seed in seeds.items()}
    for node in reversed(list(nodes)):
        incoming = [tape.total(gradients.pop(out, [])) for out in node.output]
        if any(incoming) and varying & set(node.input):
            found = PULLBACKS[node.op_type](tape, node, incoming)
            for name, gradient in itertools.zip_longest(node.input, found, fillvalue=""):
                if gradient and name in varying:
                    gradients.setdefault(name, []).append(gradient)
    return {name: tape.total(gradients.get(name, [])) for name in wanted}


def needed(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that `outputs` depend on, in their order."""
    used, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if used & set(node.output):
            used |= set(node.input)
            kept.append(node)
    return kept[::-1]
