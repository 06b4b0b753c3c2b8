"""How a population's rounds run: everything an operator can set, checked when it is set."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from fednl_runtime.fed_sync.aggregate import Rule
from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.optimize import ServerOptimizer
from fednl_runtime.fed_sync.privacy import CentralPrivacy


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rounds of a population. A round closes with `goal` updates, or at its deadline with `minimum`."""

    goal: int = 10
    minimum: int = 3
    deadline_s: float = 86_400.0
    staleness: int = 2
    """Published versions that an update's base may lie behind the newest; 0 makes rounds synchronous."""
    clip_norm: float = 1.0
    """Norm to which devices clip a difference, and the server again."""
    sigma: float = 0.0
    """Standard deviation of the noise that devices add to each number of a clipped difference."""
    max_tokens: int = 10_000_000
    absurd: float = 10.0
    """A difference longer than this many times the allowed norm is refused instead of clipped."""
    rule: Rule = dataclasses.field(default_factory=Rule)
    optimizer: ServerOptimizer = dataclasses.field(default_factory=ServerOptimizer)
    max_step_norm: float = 10.0
    """Largest norm of a published step; a round beyond it is put into quarantine."""
    privacy: CentralPrivacy | None = None
    sync_s: float = 600.0
    """Seconds between two contacts of a device, at least."""
    min_agent: str = "0.1.0"
    """The oldest agent that may take part."""
    manifest_s: float = 30 * 86_400.0
    """Seconds for which a manifest holds; it is signed anew at half of them."""

    def __post_init__(self) -> None:
        for name in ("goal", "minimum", "max_tokens"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("deadline_s", "clip_norm", "absurd", "max_step_norm", "sync_s", "manifest_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PolicyError(f"{name} is {getattr(self, name)}; it must be a positive number.")
        if self.staleness < 0 or not 0 <= self.sigma < math.inf or self.absurd < 1:
            raise PolicyError("staleness and sigma must be at least 0, absurd at least 1.")
        if self.minimum > self.goal:
            raise PolicyError(f"minimum is {self.minimum}, above the goal {self.goal}. Lower it or raise the goal.")
        if self.minimum < self.rule.least:
            raise PolicyError(f"{self.rule.kind} needs {self.rule.least} updates; set minimum to that or more.")
        if self.privacy is not None:
            self.privacy.require(self.rule)
        agent_version(self.min_agent)

    def norm_bound(self, size: int) -> float:
        """The norm of an honest difference of `size` numbers: clipped, and with the noise that devices add."""
        return math.sqrt(self.clip_norm**2 + size * self.sigma**2)

    def to_json(self) -> str:
        """The policy as a JSON object."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["rule"] = Rule(**fields["rule"])
        fields["optimizer"] = ServerOptimizer(**fields["optimizer"])
        fields["privacy"] = fields["privacy"] and CentralPrivacy(**fields["privacy"])
        return cls(**fields)


def agent_version(text: str) -> tuple[int, ...]:
    """A version as numbers that compare: 0.10.2 is above 0.9. Raises PolicyError."""
    parts = text.split("+")[0].split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise PolicyError(f"{text[:40]!r} is no version; write numbers with points between them, such as 0.1.0.")
    return tuple(int(part) for part in parts)
