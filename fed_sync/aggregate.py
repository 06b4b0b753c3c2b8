"""Many updates become one: clipping, four rules of aggregation, each with the number of members that it needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fednl_runtime.fed_sync.errors import PolicyError, RoundError
from fednl_runtime.fed_sync.update import Vector

KINDS = ("mean", "trimmed_mean", "median", "multi_krum")


@dataclasses.dataclass(frozen=True)
class Member:
    """One accepted update in a round: its difference `[size]` and what it counts."""

    update_id: str
    delta: Vector
    num_tokens: int
    staleness: int = 0
    """Published versions between the update's base and the newest."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a round aggregates; `faulty` members may say anything.

    `mean` weighs by tokens, each weight capped at `weight_cap` times the lower median. With f faulty of n
    members, clipped to C, their share s is at most f c / (f c + n // 2 + 1 - f), because that many honest
    members weigh the median or more, and they move the mean of the others by at most 2 C s.
    `trimmed_mean` and `median` stay, in each coordinate, between the least and the largest honest number.
    Whatever the rule, the norm of the mean is at most C (of the two coordinate-wise ones at most C sqrt(n)).
    """

    kind: str = "mean"
    faulty: int = 0
    weight_cap: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PolicyError(f"The rule {self.kind!r} is unknown; choose one of {', '.join(KINDS)}.")
        if self.faulty < (self.kind in ("trimmed_mean", "multi_krum")):
            raise PolicyError(f"{self.kind} needs to know how many members may be faulty; set at least 1.")
        if not 1 <= self.weight_cap < math.inf:
            raise PolicyError(f"weight_cap is {self.weight_cap}; it must be a number of at least 1.")

    @property
    def least(self) -> int:
        """The members that a round needs."""
        needs = {"mean": 1, "trimmed_mean": 2 * self.faulty + 1, "median": 2 * self.faulty + 1}
        return needs.get(self.kind, 2 * self.faulty + 3)


def norm(vector: Vector) -> float:
    """The Euclidean norm; the sum is NumPy's pairwise one, no library's whose order depends on the machine."""
    return math.sqrt(float(np.sum(np.square(vector))))


def clip(vector: Vector, limit: float) -> Vector:
    """The vector, shortened to `limit` if it is longer."""
    length = norm(vector)
    return vector if length <= limit else vector * (limit / length)


def contributions(members: Sequence[Member], clip_norm: float) -> list[tuple[Member, Vector]]:
    """Each member with its clipped difference times 1 / sqrt(1 + staleness), in the order of update ids."""
    ordered = sorted(members, key=lambda member: member.update_id)
    return [(m, clip(m.delta, clip_norm) / math.sqrt(1 + m.staleness)) for m in ordered]


def aggregate(members: Sequence[Member], rule: Rule, clip_norm: float) -> Vector:
    """One difference `[size]` from those of a round; the order of `members` makes no difference to any bit.

    Raises:
        RoundError: fewer members than the rule needs.
    """
    if len(members) < rule.least:
        raise RoundError(f"{rule.kind} needs {rule.least} updates and the round has {len(members)}. Wait for more.")
    parts = contributions(members, clip_norm)
    if rule.kind == "mean":
        return weighted_mean([v for _, v in parts], capped([m.num_tokens for m, _ in parts], rule.weight_cap))
    matrix = np.stack([vector for _, vector in parts])
    if rule.kind == "multi_krum":
        return multi_krum(matrix, rule.faulty)
    trim = rule.faulty if rule.kind == "trimmed_mean" else (len(parts) - 1) // 2
    return trimmed_mean(matrix, trim)


def capped(num_tokens: Sequence[int], cap: float) -> list[float]:
    """Weights: tokens, but at most `cap` times their lower median."""
    limit = cap * sorted(num_tokens)[(len(num_tokens) - 1) // 2]
    return [min(float(tokens), limit) for tokens in num_tokens]


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The mean, summed one vector after the other."""
    total = np.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        total += weight * vector
    return total / math.fsum(weights)


def trimmed_mean(matrix: Vector, trim: int) -> Vector:
    """Per coordinate, the mean of `[n, size]` without the `trim` smallest and largest numbers.

    With all but one or two trimmed this is the median.
    """
    assert len(matrix) > 2 * trim
    kept = np.sort(matrix, axis=0)[trim : len(matrix) - trim]
    return weighted_mean(list(kept), [1.0] * len(kept))


def multi_krum(matrix: Vector, faulty: int) -> Vector:
    """The mean of the n - f - 2 vectors of `[n, size]` that lie closest to others (Blanchard et al. 2017, section 4).

    The score of a vector is the sum of its n - f - 2 smallest squared distances; of equal scores the first wins.
    """
    close = len(matrix) - faulty - 2
    distances: NDArray[np.float64] = np.stack([np.sum(np.square(matrix - row), axis=1) for row in matrix])
    np.fill_diagonal(distances, math.inf)
    scores = np.sort(distances, axis=1)[:, :close].sum(axis=1)
    chosen = np.sort(np.argsort(scores, kind="stable")[:close])
    return weighted_mean(list(matrix[chosen]), [1.0] * close)
