"""Central differential privacy: a noised mean with a fixed denominator, and what it has cost so far."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fednl_runtime.fed_sync.aggregate import Member, Rule, contributions
from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.update import Vector


@dataclasses.dataclass(frozen=True)
class CentralPrivacy:
    """Gaussian noise of `noise_multiplier` times the clip norm on the sum of a round.

    The server sees single updates: this protects what it publishes, not what it receives.
    """

    noise_multiplier: float
    max_epsilon: float
    delta: float = 1e-6

    def __post_init__(self) -> None:
        if not (0 < self.noise_multiplier < math.inf and 0 < self.max_epsilon < math.inf and 0 < self.delta < 1):
            raise PolicyError("Central privacy needs a positive noise multiplier and epsilon, and delta below 1.")

    def require(self, rule: Rule) -> None:
        """Refuse rules whose answer one member can change by more than the noise is made for. Raises PolicyError."""
        if rule.kind != "mean":
            raise PolicyError(
                f"{rule.kind} cannot be combined with central privacy: one member can move its answer by more "
                "than clip norm / goal, which the noise is made for. Use mean, or leave privacy out."
            )

    def epsilon(self, releases: int) -> float:
        """The (epsilon, `delta`) cost of `releases` rounds for a device that is in all of them.

        By Renyi accounting of Gaussian mechanisms, without amplification by sampling: devices choose
        themselves when they come.
        """
        if releases == 0:
            return 0.0
        from dp_accounting import dp_event  # type: ignore[import-untyped]
        from dp_accounting.rdp import RdpAccountant  # type: ignore[import-untyped]

        event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(self.noise_multiplier), releases)
        return float(RdpAccountant().compose(event).get_epsilon(self.delta))

    def affords(self, releases: int) -> bool:
        """Whether the budget allows that many rounds in all."""
        return self.epsilon(releases) <= self.max_epsilon

    def noised_mean(self, members: Sequence[Member], clip_norm: float, goal: int, rng: np.random.Generator) -> Vector:
        """The sum of clipped differences plus N(0, (noise_multiplier * clip_norm)^2), over the fixed `goal`.

        All members weigh the same, and the denominator is no count: that would tell who took part.
        `rng` must be seeded by the operating system.
        """
        assert members
        total = np.zeros_like(members[0].delta)
        for _, vector in contributions(members, clip_norm):
            total += vector
        return (total + rng.normal(0.0, self.noise_multiplier * clip_norm, total.shape)) / goal
