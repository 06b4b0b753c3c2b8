"""Whether the memory a turn leaves behind may be kept."""

from __future__ import annotations

import dataclasses

import numpy as np

from fednl_runtime.errors import MemoryBreachError
from fednl_runtime.state import MemoryState

TOKEN_WEIGHTS = ("s", "w1", "w2", "w1_boundary", "w2_boundary")


def level(name: str) -> str | None:
    """The level whose fast weight the state tensor `name` is: token, cms or top; None for pending statistics."""
    suffix = name.rpartition(".")[2]
    if name == "top.f":
        return "top"
    if suffix == "cms_f":
        return "cms"
    return "token" if suffix in TOKEN_WEIGHTS else None


@dataclasses.dataclass(frozen=True)
class NormCaps:
    """Largest Frobenius norm of one fast-weight tensor, by level.

    The model bounds its own memories far below these (unit keys, clipped errors, decay): a memory
    beyond them is broken, not merely strong.
    """

    token: float = 1e3
    cms: float = 1e3
    top: float = 1e4


def check_memory(state: MemoryState, caps: NormCaps) -> None:
    """Raise MemoryBreachError if a tensor is not finite or a fast weight is beyond its cap."""
    for name, tensor in state.tensors.items():
        if not np.isfinite(tensor).all():
            raise MemoryBreachError(f"The turn left {name} not finite; its memory was discarded.")
        kind = level(name)
        if kind is None:
            continue
        norm, cap = float(np.linalg.norm(tensor)), getattr(caps, kind)
        if norm > cap:
            raise MemoryBreachError(
                f"The turn left {name} at norm {norm:.3g}, above {cap:g}; its memory was discarded."
            )


def update_norm(before: MemoryState, after: MemoryState) -> float:
    """Frobenius norm of what the slow levels (CMS and top) learnt between two states of one session."""
    slow = [name for name in before.tensors if level(name) in ("cms", "top")]
    changes = (after.tensors[name] - before.tensors[name] for name in slow)
    return float(np.sqrt(sum(float(np.sum(np.square(c, dtype=np.float64))) for c in changes)))
