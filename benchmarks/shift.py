"""Domain shift: a stream that changes source every few thousand tokens, against sessions that do not.

Every comparison is on the same tokens, read by sessions with another past, so that the difficulty of the text
cancels: `stay` read only this source so far, `fresh` read nothing.
"""

from __future__ import annotations

import numpy as np

from fednl_runtime.backend import LEARN, Backend
from fednl_runtime.evaluate import Surprise, stream
from fednl_runtime.state import Tokens

PIECE = 4096
"""Tokens of a source before the stream changes."""
BIN = 256
NEAR = 1.02
"""A stream is back when a bin's surprise is within this factor of that of a session that never left."""


def read(backend: Backend, rows: Tokens) -> Surprise:
    """Surprise `[B, T]` of tokens `[B, T + 1]`, everything learning."""
    return stream(backend, rows, lambda _: np.array([LEARN], np.float32), lambda _: None)


def bins(scores: Surprise) -> Surprise:
    """Means of bins of BIN tokens over the last axis."""
    return scores.reshape(*scores.shape[:-1], -1, BIN).mean(-1)


def tokens_until_back(changed: Surprise, stay: Surprise) -> int:
    """Tokens after the change until the first bin within NEAR of `stay`; both `[PIECE]`; PIECE if never."""
    near = bins(changed) <= NEAR * bins(stay)
    return int(near.argmax()) * BIN if near.any() else len(changed)


def retained(changed: Surprise, stay: Surprise, fresh: Surprise) -> float:
    """Share of what an uninterrupted session gains over a fresh one that is left after the detour."""
    return float((fresh.mean() - changed.mean()) / (fresh.mean() - stay.mean()))


def shift(backend: Backend, sources: list[Tokens]) -> dict[str, list[float]]:
    """A stream A B C ... A B C ... over sources of 2 PIECE + 1 tokens: figures for each source.

    `back` is for the first visit, against a session that read the second half before the first; `retained`
    and `forgotten_percent` are for the second visit, against a session that was never away.
    """
    first = [s[:PIECE] for s in sources]
    second = [s[PIECE : 2 * PIECE] for s in sources]
    walk = read(backend, np.concatenate([*first, *second, sources[-1][-1:]])[None])[0]
    stay = read(backend, np.stack([s[: 2 * PIECE + 1] for s in sources]))[:, PIECE:]
    swapped = np.stack([np.concatenate([b, a, b[:1]]) for a, b in zip(first, second, strict=True)])
    known = read(backend, swapped)[:, PIECE:]
    fresh = read(backend, np.stack([np.append(b, b[:1]) for b in second]))
    count, usable = len(sources), slice(0, PIECE - BIN)
    result: dict[str, list[float]] = {"back": [], "retained": [], "forgotten_percent": []}
    for i in range(count):
        visits = [walk[PIECE * j : PIECE * (j + 1)][usable] for j in (i, count + i)]
        if i:
            result["back"].append(tokens_until_back(visits[0], known[i][usable]))
        result["retained"].append(retained(visits[1], stay[i][usable], fresh[i][usable]))
        result["forgotten_percent"].append(100 * float(visits[1].mean() / stay[i][usable].mean() - 1))
    return result
