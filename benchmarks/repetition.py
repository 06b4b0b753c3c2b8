"""Repetition: what reading a passage again costs, verbatim or with a tenth of its tokens changed.

The control session reads other text of the same length in the place of the first reading, and the
same text in between, so the difference is what the first reading is worth.
"""

from __future__ import annotations

import numpy as np

from fednl_runtime.backend import LEARN, Backend
from fednl_runtime.evaluate import stream
from fednl_runtime.state import Tokens

PASSAGE = 256
CHANGED = 0.1
"""Share of tokens that differ in the near-verbatim repetition."""


def altered(passage: Tokens, vocabulary: Tokens, rng: np.random.Generator) -> Tokens:
    """The passage with a tenth of its tokens replaced by tokens drawn from the text."""
    places = rng.random(len(passage)) < CHANGED
    return np.where(places, rng.choice(vocabulary, len(passage)), passage)


def rows(text: Tokens, distance: int, rng: np.random.Generator) -> Tokens:
    """Three streams `[3, T + 1]`: passage again, passage changed and again, other text and the passage."""
    passage, between, other = np.split(text[: 2 * PASSAGE + distance], [PASSAGE, PASSAGE + distance])
    firsts = (passage, altered(passage, text, rng), other)
    end = text[:1]
    return np.stack([np.concatenate([first, between, passage, end]) for first in firsts])


def repetition(backend: Backend, texts: list[Tokens], distance: int, rng: np.random.Generator) -> dict[str, float]:
    """Nats a token of the second reading, averaged over texts, and what the first reading saved in percent."""
    batch = np.concatenate([rows(text, distance, rng) for text in texts])
    scores = stream(backend, batch, lambda _: np.array([LEARN], np.float32), lambda _: None)
    verbatim, near, control = scores[:, -PASSAGE - 1 : -1].reshape(len(texts), 3, PASSAGE).mean((0, 2)).tolist()
    return {
        "control": control,
        "verbatim": verbatim,
        "near_verbatim": near,
        "saved_percent": 100 * (1 - verbatim / control),
        "near_saved_percent": 100 * (1 - near / control),
    }
