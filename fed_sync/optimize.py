"""The server's step from an aggregated difference: plain, momentum or Adam, and the gate before it is published."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from fednl_runtime.fed_sync.aggregate import norm
from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.update import Vector

KINDS = ("none", "momentum", "adam")
State = Mapping[str, Vector]
"""What the optimiser remembers between rounds, `[size]` each; empty before the first."""


@dataclasses.dataclass(frozen=True)
class ServerOptimizer:
    """FedAvg, FedAvgM and FedAdam (Reddi et al. 2021, algorithm 2), with its names for the constants."""

    kind: str = "none"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PolicyError(f"The server optimiser {self.kind!r} is unknown; choose one of {', '.join(KINDS)}.")
        if not (0 < self.lr < math.inf and 0 < self.tau < math.inf):
            raise PolicyError(f"lr is {self.lr} and tau {self.tau}; both must be positive numbers.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise PolicyError(f"beta1 is {self.beta1} and beta2 {self.beta2}; both must be from 0 to below 1.")

    def step(self, delta: Vector, state: State) -> tuple[Vector, State]:
        """What to add to the rules `[size]` for an aggregated difference, and the state for the next round."""
        if self.kind == "none":
            return self.lr * delta, {}
        if self.kind == "momentum":
            m = self.beta1 * state.get("m", np.zeros_like(delta)) + delta
            return self.lr * m, {"m": m}
        m = self.beta1 * state.get("m", np.zeros_like(delta)) + (1 - self.beta1) * delta
        v = self.beta2 * state.get("v", np.zeros_like(delta)) + (1 - self.beta2) * np.square(delta)
        return self.lr * m / (np.sqrt(v) + self.tau), {"m": m, "v": v}


def gate(before: Vector, after: Vector, max_step_norm: float) -> str | None:
    """Why new rules must not be published, None if they may."""
    if not np.isfinite(after).all():
        return "the rules would hold numbers that are not finite"
    length = norm(after - before)
    return f"the step's norm {length:.4g} is above {max_step_norm:.4g}" if length > max_step_norm else None
