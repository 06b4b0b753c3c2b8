"""Streaming cross-entropy of a torch model in the arms of `eval`: on, reset and frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fednl_runtime.backend import FREEZE
from fednl_runtime.evaluate import FREEZE_AFTER, windows
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict

Scores = npt.NDArray[np.float32]
PIECE = 512
"""Tokens of a call."""


@contextmanager
def frozen(model: Hope) -> Iterator[None]:
    """The slow levels of the model stop learning."""
    scales = torch.tensor([FREEZE])
    model.adapt = lambda batch: scales.expand(batch, 2)  # type: ignore[method-assign]
    yield
    del model.adapt


@torch.no_grad()
def read(model: Hope, tokens: Tensor, state: TensorDict) -> tuple[list[Tensor], TensorDict]:
    """Surprise of tokens `[B, T + 1]` after the first, in pieces `[B, n]`, and the state at the end."""
    pieces = []
    for start in range(0, tokens.shape[1] - 1, PIECE):
        part = tokens[:, start : start + PIECE + 1]
        nats, state = model.loss(part[:, :-1], part[:, 1:], state)
        pieces.append(nats)
    return pieces, state


def carried(model: Hope, tokens: Tensor) -> Scores:
    """Arm `on`: surprise `[B, T]` of tokens `[B, T + 1]`, memory carried throughout."""
    pieces, _ = read(model, tokens, model.zeros(len(tokens)))
    return torch.cat(pieces, 1).numpy()


def stopped(model: Hope, tokens: Tensor) -> Scores:
    """Arm `frozen`: the slow levels learn from the first tokens only."""
    before, state = read(model, tokens[:, : FREEZE_AFTER + 1], model.zeros(len(tokens)))
    with frozen(model):
        after, _ = read(model, tokens[:, FREEZE_AFTER:], state)
    return torch.cat([*before, *after], 1).numpy()


def cut_short(model: Hope, tokens: Tensor) -> Scores:
    """Arm `reset`: memory cleared before every window, its context read again unscored."""
    out = np.empty((len(tokens), tokens.shape[1] - 1), np.float32)
    for context, start, stop in windows(out.shape[1]):
        state = model.zeros(len(tokens))
        if start > context:
            _, state = read(model, tokens[:, context : start + 1], state)
        pieces, _ = read(model, tokens[:, start : stop + 1], state)
        out[:, start:stop] = torch.cat(pieces, 1).numpy()
    return out


ARMS = {"on": carried, "reset": cut_short, "frozen": stopped}
