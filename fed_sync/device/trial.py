"""Whether rules may go live here: they run, and do not raise the surprise at this device's own recent text."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fednl_runtime.backend import Backend
from fednl_runtime.errors import FednlError
from fednl_runtime.rule_training import held_out_loss
from fednl_runtime.state import Tensors, Tokens

SMOKE_TOKENS = 65
MARGIN = 0.01
"""How much the streaming cross-entropy may rise, as a share, before rules are refused."""
LEAST_TOKENS = 512
"""Tokens of text that a comparison needs; below it only the smoke run decides."""
MOST_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a trial found; the losses are nats a token of the rules in use and of the new ones, None without text."""

    fits: bool
    reason: str
    before: float | None = None
    after: float | None = None


def judge(backend: Backend, new: Tensors, present: Tensors, tokens: Tokens, margin: float = MARGIN) -> Verdict:
    """Try `new` rules against the `present` ones ({} are the model's own) on the end of a text `[T]`."""
    text = tokens[-MOST_TOKENS:]
    smoke = np.arange(SMOKE_TOKENS, dtype=np.int64) % backend.config.vocab_size
    try:
        if not math.isfinite(held_out_loss(backend, new, smoke)):
            return Verdict(False, "their output is not finite")
        if len(text) < LEAST_TOKENS:
            return Verdict(True, "they run; there is too little text to compare on")
        after, before = held_out_loss(backend, new, text), held_out_loss(backend, present, text)
    except (FednlError, RuntimeError, ValueError) as error:
        return Verdict(False, f"they do not run ({error})")
    if after <= before * (1 + margin):  # false for nan
        return Verdict(True, "surprise does not rise", before, after)
    return Verdict(False, f"surprise rises from {before:.4f} to {after:.4f} nats a token", before, after)
