"""Multi-query associative recall: a small Hope is trained for the task, then asked over growing distances.

A sequence is eight key-value pairs, filler, and the eight keys again in another order, each followed by
its value. Training sequences are at most LONGEST tokens of filler long; the distances asked are up to 32K.
The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import time

import click
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.train import TrainSettings, optimizer, set_up_torch
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict

PAIRS, KIND = 8, 32
"""Pairs of a sequence; tokens of each kind: filler from 0, keys from KIND, values from 2 KIND."""
CONFIG = HopeConfig(3 * KIND, d_model=64, n_head=2, d_cms=64, top_rank=0)
"""The mix of layers that is shipped, small, without the top level."""

DISTANCES = (512, 2048, 8192, 32768)
SHORTEST, LONGEST = 4, 256
"""Longest filler of the first and of the last training sequences. Asked over a distance from the start, a model does
not find the task in thousands of steps; found close by, it carries over."""

Array = npt.NDArray[np.int64]


def pairs(batch: int, rng: np.random.Generator) -> Array:
    """Keys and values `[B, PAIRS, 2]`, all different within a row."""
    keys, values = (np.stack([rng.permutation(KIND)[:PAIRS] for _ in range(batch)]) for _ in range(2))
    return np.stack([keys + KIND, values + 2 * KIND], -1)


def shuffled(chosen: Array, rng: np.random.Generator) -> Array:
    """The pairs of each row in another order, as tokens `[B, 2 PAIRS]`."""
    return (
        rng.permuted(chosen.reshape(len(chosen), PAIRS, 2).view("V16"), axis=1).view(np.int64).reshape(len(chosen), -1)
    )


def sequences(batch: int, filler: int, rng: np.random.Generator) -> Tensor:
    """Whole sequences `[B, 4 PAIRS + filler]`."""
    chosen = pairs(batch, rng)
    between = rng.integers(0, KIND, (batch, filler))
    return torch.from_numpy(np.concatenate([chosen.reshape(batch, -1), between, shuffled(chosen, rng)], 1))


def query_loss(model: Hope, tokens: Tensor) -> Tensor:
    """Mean nats of the values asked for at the end of sequences."""
    nats, _ = model.loss(tokens[:, :-1], tokens[:, 1:], model.zeros(len(tokens)))
    return nats[:, -(2 * PAIRS - 1) :: 2].mean()


def draw_filler(progress: float, rng: np.random.Generator) -> int:
    """Filler of a step's sequences: log-uniform up to a bound that has grown to LONGEST at 0.7 of the training."""
    longest = SHORTEST * (LONGEST / SHORTEST) ** min(1.0, progress / 0.7)
    return int(2 ** rng.uniform(1, np.log2(longest)))


def train(model: Hope, steps: int, batch: int, rng: np.random.Generator) -> list[float]:
    """Losses of `steps` training steps of at most `batch` rows, with a warm-up and a cool-down."""
    adam = optimizer(model, TrainSettings(weight_decay=0.01))
    losses = []
    for step in range(steps):
        share = min(1.0, (step + 1) / 50, 2.5 * (1 - step / steps))
        for group in adam.param_groups:
            group["lr"] = 3e-3 * share
        filler = draw_filler(step / steps, rng)
        rows = min(batch, batch * 160 // (4 * PAIRS + filler))
        loss = query_loss(model, sequences(rows, filler, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def read(model: Hope, tokens: Tensor, state: TensorDict, learn: bool) -> tuple[Tensor, TensorDict]:
    """Logits `[B, T, V]` of the last piece of at most 512 tokens, and the state after all."""
    adapt = torch.full((len(tokens), 2), float(learn))
    logits = torch.empty(0)
    for part in tokens.split(512, 1):
        logits, state = model(part, state, adapt)
    return logits, state


@torch.no_grad()
def accuracy(model: Hope, batch: int, learn: bool, rng: np.random.Generator) -> dict[int, float]:
    """Share of values recalled at each distance; `learn` says whether the memories are written at all."""
    chosen = pairs(batch, rng)
    _, state = read(model, torch.from_numpy(chosen.reshape(batch, -1)), model.zeros(batch), learn)
    result, distance = {}, 0
    for target in DISTANCES:
        filler = rng.integers(0, KIND, (batch, target - distance))
        _, state = read(model, torch.from_numpy(filler), state, learn)
        queries = torch.from_numpy(shuffled(chosen, rng))
        logits, _ = read(model, queries, state, learn)
        found = logits[:, ::2, 2 * KIND :].argmax(-1) + 2 * KIND
        result[target], distance = float((found == queries[:, 1::2]).float().mean()), target
    return result


@click.command()
@click.option("--steps", default=1000, show_default=True)
@click.option("--batch", default=64, show_default=True)
@click.option("--trials", default=16, show_default=True, help="Sequences asked at each distance.")
@click.option("--seed", default=0, show_default=True)
def main(steps: int, batch: int, trials: int, seed: int) -> None:
    """Train the small model and ask it."""
    set_up_torch(None)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, start = Hope(CONFIG), time.monotonic()
    losses = train(model, steps, batch, rng)
    report = {"steps": steps, "seconds": round(time.monotonic() - start), "final_loss": float(np.mean(losses[-50:]))}
    for name, learn in (("on", True), ("off", False)):
        report[name] = accuracy(model, trials, learn, rng)
    click.echo(json.dumps(report | {"seed": seed, "chance": 1 / KIND, "losses": losses[:: max(1, steps // 30)]}))


if __name__ == "__main__":
    main()
