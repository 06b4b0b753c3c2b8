"""What a changed model file costs: logits and streaming cross-entropy beside those of the file it came from."""

from __future__ import annotations

import dataclasses

import numpy as np

from fednl_runtime.backend import LEARN, Backend, segments
from fednl_runtime.evaluate import carried
from fednl_runtime.sampling import log_softmax
from fednl_runtime.state import Array, MemoryState, Tokens

LOGIT_TOKENS = 512
"""Tokens at the start of the text whose logits are compared one by one."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One file beside another on the same text, both from an empty memory.

    Cross-entropy in nats a token: `on` learns throughout, `frozen` stops after 512 tokens.
    """

    tokens: int
    on: tuple[float, float]
    frozen: tuple[float, float]
    logit_difference: float
    """Root mean square difference of log-probabilities, nats."""
    same_choice: float
    """Part of the tokens at which both think the same one likeliest."""

    @property
    def rise_percent(self) -> float:
        """How much higher the second file's cross-entropy is, the worse of both arms, in percent."""
        return 100 * max(after / before - 1 for before, after in (self.on, self.frozen))


def cost(before: Backend, after: Backend, tokens: Tokens) -> Cost:
    """Compare two files of one vocabulary on tokens `[T + 1]`."""
    scores = [carried(backend, tokens, lambda _: None) for backend in (before, after)]
    on, frozen = ((float(scores[0][arm].mean()), float(scores[1][arm].mean())) for arm in (0, 1))
    first, second = (log_probabilities(backend, tokens[:LOGIT_TOKENS]) for backend in (before, after))
    difference = float(np.sqrt(np.square(first - second).mean()))
    return Cost(len(tokens) - 1, on, frozen, difference, float((first.argmax(-1) == second.argmax(-1)).mean()))


def log_probabilities(backend: Backend, tokens: Tokens) -> Array:
    """Log-probabilities `[T, V]` after each of tokens `[T]`, from an empty memory."""
    running = backend.open(MemoryState.zeros(backend.config))
    parts = [
        running.feed(tokens[None, part], np.array([LEARN], np.float32))[0].copy()
        for part in segments(0, len(tokens), backend.segment)
    ]
    return log_softmax(np.concatenate(parts))


def own_text(backend: Backend, first: int, length: int, seed: int = 0) -> Tokens:
    """`length` tokens that the model writes when it has read the token `first`, which comes first."""
    rng = np.random.default_rng(seed)
    running, tokens = backend.open(MemoryState.zeros(backend.config)), [first]
    while len(tokens) < length:
        logits = running.feed(np.array([tokens[-1:]]), np.array([LEARN], np.float32))[0, 0]
        tokens.append(int(np.argmax(logits + rng.gumbel(size=len(logits)))))
    return np.array(tokens)
