"""Does it learn? Streaming cross-entropy of one text with memory on, cut short, or frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from fednl_runtime.backend import FREEZE, LEARN, Backend, segments
from fednl_runtime.sampling import log_softmax
from fednl_runtime.state import Array, MemoryState, Tokens

ARMS = ("on", "reset", "frozen")
BIN = 1024
"""Tokens in a bin of the curve."""
RESET_WINDOW = 512
"""Arm `reset`: tokens after which the memory is cleared."""
RESET_CONTEXT = 128
"""Arm `reset`: tokens before each window that are read again, unscored, so that local context is equal."""
FREEZE_AFTER = 512
"""Arm `frozen`: tokens after which the slow levels stop learning."""
Surprise = npt.NDArray[np.float64]
Report = Callable[[int], None]
"""Called with the number of tokens read since the last call."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm's result: nats a token on average, bits a byte, and nats a token of each 1,024-token bin."""

    nats_per_token: float
    bits_per_byte: float
    bins: list[float]


def surprise(logits: Array, targets: Tokens) -> Surprise:
    """-log p of targets `[B, T]` under logits `[B, T, V]`, in nats."""
    return -np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0].astype(np.float64)


def stream(backend: Backend, tokens: Tokens, adapt: Callable[[int], Array], report: Report) -> Surprise:
    """Surprise of tokens `[B, T + 1]` after the first, read from fresh sessions: `[B, T]`.

    `adapt(position)` gives the scales `[B, 2]` or `[1, 2]` of the segment that starts there.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    running = backend.open(MemoryState.zeros(backend.config, rows))
    out = np.empty((rows, length))
    for part in segments(0, length, backend.segment):
        scales = np.broadcast_to(adapt(part.start), (rows, 2))
        logits = running.feed(tokens[:, part], scales)
        out[:, part] = surprise(logits, tokens[:, part.start + 1 : part.stop + 1])
        report(rows * (part.stop - part.start))
    return out


def carried(backend: Backend, tokens: Tokens, report: Report) -> tuple[Surprise, Surprise]:
    """Surprise `[T]` of the arms `on` and `frozen`, as two rows of one batch."""

    def adapt(position: int) -> Array:
        return np.array([LEARN, LEARN if position < FREEZE_AFTER else FREEZE], np.float32)

    on, frozen = stream(backend, np.stack([tokens, tokens]), adapt, report)
    return on, frozen


def windows(length: int) -> Iterator[tuple[int, int, int]]:
    """(start of the context, start, stop) of each window of the arm `reset` in `length` predictions."""
    for start in range(0, length, RESET_WINDOW):
        yield max(0, start - RESET_CONTEXT), start, min(start + RESET_WINDOW, length)


def cut_short(backend: Backend, tokens: Tokens, batch: int, report: Report) -> Surprise:
    """Surprise `[T]` of the arm `reset`; `batch` windows of equal shape are read at once."""
    length = len(tokens) - 1
    out = np.empty(length)
    groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for context, start, stop in windows(length):
        groups.setdefault((start - context, stop - context), []).append((context, start, stop))
    for (skip, size), members in groups.items():
        for i in range(0, len(members), batch):
            chosen = members[i : i + batch]
            rows = np.stack([tokens[context : context + size + 1] for context, _, _ in chosen])
            scores = stream(backend, rows, lambda _: np.array([LEARN], np.float32), report)
            for (_, start, stop), row in zip(chosen, scores, strict=True):
                out[start:stop] = row[skip:]
    return out


def work(length: int) -> int:
    """Tokens that `evaluate` reads for a text of `length` predictions, for a progress bar."""
    return 2 * length + sum(stop - context for context, _, stop in windows(length))


def summarise(scores: Surprise, num_bytes: int) -> Arm:
    """Averages and bins of one arm's surprise `[T]`."""
    bins = [float(scores[i : i + BIN].mean()) for i in range(0, len(scores), BIN)]
    return Arm(float(scores.mean()), float(scores.sum() / math.log(2) / num_bytes), bins)


def evaluate(backend: Backend, tokens: Tokens, num_bytes: int, report: Report, batch: int = 16) -> dict[str, Arm]:
    """All arms over tokens `[T + 1]` of a text of `num_bytes` bytes, same weights, from empty memory."""
    on, frozen = carried(backend, tokens, report)
    reset = cut_short(backend, tokens, batch, report)
    return {name: summarise(scores, num_bytes) for name, scores in zip(ARMS, (on, reset, frozen), strict=True)}


def mean_difference(files: list[dict[str, Arm]], other: str) -> float:
    """How much lower (negative) `on` is than another arm, in percent, averaged over files."""
    ratios = [arms["on"].nats_per_token / arms[other].nats_per_token for arms in files]
    return 100 * (float(np.mean(ratios)) - 1)
