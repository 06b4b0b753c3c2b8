"""Streaming cross-entropy at several lengths of one text, from one reading of each arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fednl_runtime.backend import Backend
from fednl_runtime.corpus import encode_documents, read_text
from fednl_runtime.evaluate import ARMS, Surprise, carried, cut_short
from fednl_runtime.state import Tokens
from fednl_runtime.tokenizer import Tokenizer

Means = dict[str, float]
"""Nats a token by arm."""


def read_tokens(tokenizer: Tokenizer, path: Path, tail: int = 0) -> Tokens:
    """The tokens of a text file, or what training holds out of it: the last `tail`, at most a tenth."""
    tokens = encode_documents(tokenizer, read_text(path))
    return tokens[-min(tail, len(tokens) // 10) :] if tail else tokens


def read_arms(backend: Backend, tokens: Tokens, report: Callable[[int], None]) -> dict[str, Surprise]:
    """Surprise `[T]` of tokens `[T + 1]` in the arms of `eval`."""
    on, frozen = carried(backend, tokens, report)
    return dict(zip(ARMS, (on, cut_short(backend, tokens, 16, report), frozen), strict=True))


def at_lengths(scores: dict[str, Surprise], lengths: Iterable[int]) -> dict[int, Means]:
    """Means over the first tokens, for each length that the text has: a stream is causal."""
    size = len(scores["on"])
    return {n: {arm: float(s[:n].mean()) for arm, s in scores.items()} for n in lengths if n <= size}


def percent(means: Means, other: str) -> float:
    """How much lower (negative) `on` is than another arm."""
    return 100 * (means["on"] / means[other] - 1)


def summary(files: dict[str, dict[int, Means]], lengths: Iterable[int]) -> dict[int, dict[str, Any]]:
    """For each length: files, average and worst difference of `on` to `reset`, average to `frozen`.

    `same_files` is the average difference to `reset` of these files at each of the lengths: does the gap grow?
    """
    marks, report = list(lengths), {}
    for length in marks:
        if rows := [means for means in files.values() if length in means]:
            changes = [percent(row[length], "reset") for row in rows]
            shorter = [n for n in marks if n <= length]
            report[length] = {
                "files": len(rows),
                "on_vs_reset_percent": float(np.mean(changes)),
                "worst_on_vs_reset_percent": max(changes),
                "on_vs_frozen_percent": float(np.mean([percent(row[length], "frozen") for row in rows])),
                "same_files": {n: float(np.mean([percent(row[n], "reset") for row in rows])) for n in shorter},
            }
    return report


def table(files: dict[str, dict[int, Means]], lengths: Iterable[int]) -> str:
    """Markdown: nats a token over each whole text, and how much lower `on` is than `reset` after so many tokens."""
    marks = list(lengths)
    head = ["file", "tokens", *ARMS, "on against frozen", "against reset", *(f"at {n // 1024}K" for n in marks)]
    rows = ["| " + " | ".join(head) + " |", "|---|" + (len(head) - 1) * "---:|"]
    for name, means in files.items():
        size = max(means)
        nats = [f"{means[size][arm]:.3f}" for arm in ARMS]
        shares = [f"{percent(means[size], arm):+.1f} %" for arm in ("frozen", "reset")]
        shares += [f"{percent(means[n], 'reset'):+.1f} %" if n in means else "" for n in marks]
        rows.append("| " + " | ".join([name, f"{size:,}", *nats, *shares]) + " |")
    return "\n".join(rows)
