"""The configuration of a Hope model: everything that shapes follow from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

from fednl_runtime.errors import ConfigError

PROFILES = ("delta", "self_modifying")
MEMORIES = ("k", "v", "eta", "alpha", "mem")
"""The five memories of a self-modifying layer, in the order of their stacked tensors."""

INPUTS = ("k", "v", "q", "g")
"""The projections that pass through the causal convolution, in the order of their channels."""

WHOLE = {
    "vocab_size": 1,
    "d_model": 1,
    "n_head": 1,
    "d_memory": 1,
    "memory_period": 1,
    "d_conv": 2,
    "d_cms": 1,
    "cms_rank": 1,
    "top_rank": 0,
    "top_period": 1,
}
"""The smallest value of each whole number of a configuration."""


@dataclasses.dataclass(frozen=True)
class HopeConfig:
    """Shapes and constants of a Hope model (arXiv 2512.24695, section 8).

    Periods are in tokens and tied to the absolute position of a session, never to calls.
    """

    vocab_size: int
    d_model: int = 256
    n_head: int = 4
    layers: tuple[str, ...] = ("delta", "delta", "self_modifying", "delta")
    d_memory: int = 32
    """Hidden width of a self-modifying memory, per head."""
    memory_period: int = 64
    """Tokens between promotions of the running weights to boundary weights."""
    d_conv: int = 4
    """Window of the causal convolution, in tokens."""
    cms_periods: tuple[int, ...] = (512,)
    """Update period of each CMS level of a block, fastest first."""
    d_cms: int = 768
    """Hidden width of the static MLP of a CMS level."""
    cms_rank: int = 32
    top_rank: int = 64
    """Rank of the top level; 0 leaves it out."""
    top_period: int = 16
    eta_max: float = 1.0
    error_clip: float = 0.2
    """Largest norm of e and d. At 1 the loop of self-generated values is chaotic: it doubles a rounding error at
    every promotion, so that two splits of one text part company within 2,000 tokens; at 0.2 they stay together."""
    log_alpha_min: float = -4.0
    norm_eps: float = 1e-6
    norm_cap: float = 64.0
    """Largest Frobenius norm of the top level's fast weight, relative to 1 / rms(|E|)."""

    def __post_init__(self) -> None:
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        for name in ("eta_max", "error_clip", "norm_eps", "norm_cap"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number.")
        if not -math.inf < self.log_alpha_min <= 0:
            raise ConfigError(f"log_alpha_min is {self.log_alpha_min}; it must be at most 0.")
        if self.d_model % self.n_head:
            raise ConfigError(f"d_model is {self.d_model}; it must be a multiple of n_head, {self.n_head}.")
        if not self.layers or any(p not in PROFILES for p in self.layers):
            raise ConfigError(f"layers is {self.layers}; give one or more of {', '.join(PROFILES)}.")
        if any(type(p) is not int or p < 1 for p in self.cms_periods):
            raise ConfigError(f"cms_periods is {self.cms_periods}; each must be a whole number of at least 1.")
        if any(b % a for a, b in itertools.pairwise(self.cms_periods)):
            raise ConfigError(f"cms_periods is {self.cms_periods}; each must be a multiple of the one before.")

    @property
    def n_layer(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_head

    @property
    def n_cms(self) -> int:
        """Number of CMS levels in each block."""
        return len(self.cms_periods)

    @property
    def segment(self) -> int:
        """Tokens between the multiples of position that no call may cross."""
        periods = list(self.cms_periods)
        periods += [self.top_period] * bool(self.top_rank) + [self.memory_period] * ("self_modifying" in self.layers)
        return math.gcd(*periods) or self.memory_period

    def to_json(self) -> str:
        """The configuration as a JSON object with sorted keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> HopeConfig:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: not JSON, a field is missing, or a field is unknown to this version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("layers", "cms_periods"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"The model configuration cannot be read ({error}). Use a newer fednl-runtime."
            ) from error
