"""From logits to the next token, and what the model thought of a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

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
FIRST_TRIED = (64, 1024)
"""Numbers of tokens among which top_p is looked for before all are sorted."""


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


def likeliest(scores: Array, num: int) -> npt.NDArray[np.intp]:
    """Indices of the `num` largest scores `[V]`, largest first; of equal ones the first comes first.

    Only those that may be among them are sorted: to sort a vocabulary takes longer than to choose from it.
    """
    if num >= len(scores):
        return np.argsort(-scores, kind="stable")
    found = np.flatnonzero(scores >= np.partition(scores, -num)[-num]) if num else np.empty(0, np.intp)
    return found[np.argsort(-scores[found], kind="stable")[:num]]


def nucleus(weights: Array, params: SamplingParams) -> npt.NDArray[np.intp]:
    """Tokens that top_k, then top_p leave of weights `[V]`, likeliest first."""
    mass, kept = np.zeros(1), np.empty(0, np.intp)
    total = 0.0 if params.top_k else weights.sum()
    for num in (params.top_k,) if params.top_k else (*FIRST_TRIED, len(weights)):
        kept = likeliest(weights, num)
        mass = np.cumsum(weights[kept])
        if mass[-1] >= params.top_p * total:
            break
    return kept[: 1 + int(np.searchsorted(mass, params.top_p * (total or mass[-1])))]


def truncate(weights: Array, params: SamplingParams) -> Array:
    """Weights `[V]` with those outside top_k, then top_p, then min_p set to 0; one always remains."""
    if params.top_k or params.top_p < 1:
        kept = nucleus(weights, params)
        truncated = np.zeros_like(weights)
        truncated[kept] = weights[kept]
        weights = truncated
    return np.where(weights >= params.min_p * weights.max(), weights, 0) if params.min_p else weights


def draw(weights: Array, rng: np.random.Generator) -> int:
    """An index, each as likely as its weight of `[V]`; the largest weight must be 1 or more."""
    mass = np.cumsum(weights)
    return int(mass.searchsorted(rng.random() * mass[-1], side="right"))


def sample(logits: Array, params: SamplingParams, rng: np.random.Generator, history: Collection[int]) -> int:
    """The next token, from logits `[V]` and the tokens of the turn so far."""
    scores = adjust(logits, params, history)
    if params.temperature == 0:
        return int(scores.argmax())
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - scores.max()) / params.temperature)
    return draw(truncate(weights, params), rng)


def log_softmax(logits: Array) -> Array:
    """Log-probabilities over the last axis: the model's own, before temperature and truncation."""
    logprobs: Array = logits - logits.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))  # in place: a prompt's piece may be 100 MB of logits
    return logprobs


def top_logprobs(logprobs: Array, num: int) -> tuple[tuple[int, float], ...]:
    """The `num` likeliest tokens of logprobs `[V]` with their log-probabilities, likeliest first."""
    return tuple((int(token), float(logprobs[token])) for token in likeliest(logprobs, num))
