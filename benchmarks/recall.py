"""Needles in real text: eight facts, a long stretch of other text, then eight questions.

Facts are `The password of the KEY is VALUE.` with words drawn at random. After each distance every
question is asked of a copy of the session, and the eight values compete for the next token.
"""

from __future__ import annotations

import re

import numpy as np

from fednl_runtime.backend import FREEZE, LEARN, Backend, Stream, segments
from fednl_runtime.sampling import log_softmax
from fednl_runtime.state import Array, MemoryState, Tokens
from fednl_runtime.tokenizer import Tokenizer

PAIRS = 8
ARMS = {"on": LEARN, "frozen": FREEZE, "off": (0.0, 0.0)}
"""Everything learns, only the token memories learn, nothing does."""


def words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a space and a lower-case English word of at least four letters."""
    pattern = re.compile(rb" [a-z]{4,9}")
    return [token for token in range(tokenizer.vocab_size) if pattern.fullmatch(tokenizer.token_bytes(token))]


def facts(tokenizer: Tokenizer, rng: np.random.Generator) -> tuple[Tokens, list[Tokens], Tokens]:
    """The facts as one run of tokens, the beginning of each as a question, and the values `[8]`."""
    chosen = rng.choice(words(tokenizer), 2 * PAIRS, replace=False)
    keys, values = chosen[:PAIRS], chosen[PAIRS:]
    start, middle = tokenizer.encode("\nThe password of the"), tokenizer.encode(" is")
    questions = [np.array([*start, key, *middle]) for key in keys]
    stop = tokenizer.encode(".")
    parts = [np.array([*q, value, *stop]) for q, value in zip(questions, values, strict=True)]
    return np.concatenate(parts), questions, values


def feed(stream: Stream, position: int, tokens: Tokens, adapt: Array, segment: int) -> Array:
    """Read tokens `[B, T]` from `position` on; logits `[B, V]` of the last."""
    logits = np.empty(0)
    for part in segments(position, tokens.shape[1], segment):
        logits = stream.feed(tokens[:, part], adapt)[:, -1]
    return logits


def answers(
    backend: Backend, state: MemoryState, questions: list[Tokens], values: Tokens, adapt: tuple[float, float]
) -> tuple[float, float]:
    """Share of questions whose value beats the other seven, and its lead over their mean in nats."""
    right, lead = [], []
    scales = np.array([adapt], np.float32)
    for i, question in enumerate(questions):
        logits = feed(backend.open(state), int(state.position[0]), question[None], scales, backend.segment)
        scores = log_softmax(logits)[0, values]
        right.append(scores.argmax() == i)
        lead.append(scores[i] - np.delete(scores, i).mean())
    return float(np.mean(right)), float(np.mean(lead))


def recall(
    backend: Backend, tokenizer: Tokenizer, text: Tokens, distances: list[int], rng: np.random.Generator
) -> dict[str, dict[int, tuple[float, float]]]:
    """One trial: accuracy and lead of each arm at each distance, the text between being `text [T]`."""
    fact_tokens, questions, values = facts(tokenizer, rng)
    scales = np.array(list(ARMS.values()), np.float32)
    stream = backend.open(MemoryState.zeros(backend.config, len(ARMS)))
    result: dict[str, dict[int, tuple[float, float]]] = {arm: {} for arm in ARMS}
    position, read, new = 0, 0, fact_tokens
    for distance in distances:
        new = np.concatenate([new, text[read:distance]])
        feed(stream, position, np.tile(new, (len(ARMS), 1)), scales, backend.segment)
        position, read, new = position + len(new), distance, text[:0]
        state = stream.snapshot()
        for i, (arm, adapt) in enumerate(ARMS.items()):
            result[arm][distance] = answers(backend, state.row(i), questions, values, adapt)
    return result


def average(trials: list[dict[str, dict[int, tuple[float, float]]]]) -> dict[str, dict[int, dict[str, float]]]:
    """Means over trials."""
    return {
        arm: {
            distance: dict(
                zip(("accuracy", "lead"), np.mean([t[arm][distance] for t in trials], 0).tolist(), strict=True)
            )
            for distance in trials[0][arm]
        }
        for arm in ARMS
    }
