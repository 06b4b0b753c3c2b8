"""From logits to the next token, and what the model thought of a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from fednl_runtime.errors import RequestError
from fednl_runtime.state import Array

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, 1_000_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.1, 10),
    "max_tokens": (0, 1_000_000),
}
"""Smallest and largest value of each number a request may set."""
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 8, 256
MAX_BIAS = 100


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Temperature 0 is greedy; 0 turns top_k and min_p off.

    The same seed gives the same answer from the same state. `logprobs` is the number of
    alternatives reported with each token, None for no log-probabilities at all.

    Raises:
        RequestError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also if it is not a number
                raise RequestError(f"{name} is {value}; it must lie between {low} and {high}.", name)
        if self.top_p == 0:
            raise RequestError("top_p is 0, which leaves no token to choose; use temperature 0 for greedy.", "top_p")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs is {self.logprobs}; it must lie between 0 and {MAX_LOGPROBS}.", "logprobs")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed.", "stop")
        if not all(1 <= len(s) <= MAX_STOP_LENGTH for s in self.stop):
            raise RequestError(f"Each stop string must have 1 to {MAX_STOP_LENGTH} characters.", "stop")
        if not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):
            raise RequestError(f"Each logit_bias must lie between -{MAX_BIAS} and {MAX_BIAS}.", "logit_bias")

    def rng(self, choice: int = 0) -> np.random.Generator:
        """The generator of answer number `choice`: the same for the same seed, fresh without one."""
        return np.random.default_rng(None if self.seed is None else [self.seed % 2**64, choice])


def adjust(logits: Array, params: SamplingParams, history: Collection[int]) -> Array:
    """Logits `[V]` in float64 after logit bias and repetition penalty (arXiv 1909.05858, section 4.1)."""
    scores = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.repetition_penalty != 1 and history:
        seen = np.fromiter(set(history), np.int64)
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    return scores


def truncate(weights: Array, params: SamplingParams) -> Array:
    """Weights `[V]` with those outside top_k, then top_p, then min_p set to 0; one always remains."""
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return weights
    kept = np.argsort(-weights, kind="stable")[: params.top_k or None]
    mass = np.cumsum(weights[kept])
    kept = kept[: 1 + int(np.searchsorted(mass, params.top_p * mass[-1]))]
    kept = kept[weights[kept] >= params.min_p * weights[kept[0]]]
    truncated = np.zeros_like(weights)
    truncated[kept] = weights[kept]
    return truncated


def sample(logits: Array, params: SamplingParams, rng: np.random.Generator, history: Collection[int]) -> int:
    """The next token, from logits `[V]` and the tokens of the turn so far."""
    scores = adjust(logits, params, history)
    if params.temperature == 0:
        return int(scores.argmax())
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - scores.max()) / params.temperature)
    weights = truncate(weights, params)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis: the model's own, before temperature and truncation."""
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs


def top_logprobs(logprobs: Array, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` likeliest tokens of logprobs `[V]` with their log-probabilities, likeliest first."""
    best = np.argsort(-logprobs, kind="stable")[:num]
    return tuple((int(token), float(logprobs[token])) for token in best)
