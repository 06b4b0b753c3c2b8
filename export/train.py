"""Training Hope with carried memory: truncated back-propagation over lanes of continuous documents."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import CheckpointError
from fednl_runtime.export.checkpoint import save_checkpoint, write_atomically
from fednl_runtime.export.data import Lanes, Source
from fednl_runtime.hope import Hope, parameters
from fednl_runtime.recurrence import TensorDict
from fednl_runtime.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """The recipe; times are in hours of training, lengths in tokens."""

    hours: float = 2.0
    batch: int = 8
    window: int = 512
    run: tuple[int, int] = (8192, 131072)
    start: int = 256
    """Position at which a fresh session begins. A level whose period is the window would close where windows meet,
    and what it writes would never get a gradient; half a window moves its boundaries inside."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: int = 200
    cool_down: float = 0.2
    """Part of the time, at the end, in which the learning rate falls."""
    clip: float = 1.0
    seed: int = 1
    bf16: bool = True
    compile: bool = True
    checkpoint_seconds: float = 300.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """One step, as it is logged."""

    step: int
    tokens: int
    seconds: float
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float


def set_up_torch(threads: int | None) -> None:
    """Settings of the process for training: threads, no subnormals, fast float32 products."""
    if threads:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("medium")


def learning_rate(settings: TrainSettings, step: int, share: float) -> float:
    """Linear warm-up in steps, then level, and at the end of the time linear down to 2 %.

    `share` is the part of the time that is spent. A run with hours to spare can be stopped at any time and
    brought to its end by resuming it with fewer hours.
    """
    warmup = min(1.0, (step + 1) / settings.warmup)
    left = min(1.0, max(0.0, 1 - share) / settings.cool_down)
    return settings.learning_rate * warmup * (0.02 + 0.98 * left)


def optimizer(model: Hope, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: gates, norms, taps and rates are left free."""
    free = ("norm", "conv", "r_eta", "b_eta", "r_alpha", "b_alpha", "step", "decay", "w1_init")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(free)], "weight_decay": settings.weight_decay},
        {"params": [p for n, p in named if n.endswith(free)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def forget(state: TensorDict, fresh: Tensor) -> TensorDict:
    """The state with the rows in `fresh [B]` cleared."""
    return {n: t.masked_fill(fresh.view(-1, *[1] * (t.dim() - 1)), 0) for n, t in state.items()}


class Trainer:
    """A training run in a folder: resumes where the folder's checkpoint ends."""

    def __init__(
        self, config: HopeConfig, tokenizer_json: str, sources: list[Source], settings: TrainSettings, folder: Path
    ) -> None:
        torch.manual_seed(settings.seed)
        self.config, self.tokenizer_json, self.sources = config, tokenizer_json, sources
        self.settings, self.folder = settings, folder
        self.model = self.build()
        self.optimizer = optimizer(self.model, settings)
        self.rng = np.random.default_rng(settings.seed)
        self.lanes = Lanes(sources, settings.batch, self.rng, settings.run, Tokenizer(tokenizer_json).end_of_text)
        self.state = self.model.zeros(settings.batch)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "resume.pt").exists():
            self.resume()
        if settings.compile:
            self.model.compile()

    def build(self) -> Hope:
        """The model to train; a baseline puts its own here."""
        return Hope(self.config, torch.bfloat16 if self.settings.bf16 else None)

    def train_step(self) -> tuple[float, float]:
        """One optimiser step over one window of every lane: loss in nats a token, gradient norm."""
        window, fresh = self.lanes.next(self.settings.window)
        state = forget(self.state, torch.from_numpy(fresh))
        state["position"] = state["position"] + self.settings.start * torch.from_numpy(fresh)
        tokens = torch.from_numpy(window)
        nats, state = self.model.loss(tokens[:, :-1], tokens[:, 1:], state)
        loss = nats.mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = {n: t.detach().contiguous() for n, t in state.items()}
        return loss.item(), float(norm)

    def run(self, report: Callable[[Progress], None]) -> None:
        """Train until the hours are spent, logging every step to `log.jsonl` and saving as it goes."""
        saved = time.monotonic()
        with (self.folder / "log.jsonl").open("a") as log:
            while self.seconds < self.settings.hours * 3600:
                progress = self.timed_step()
                log.write(json.dumps(dataclasses.asdict(progress)) + "\n")
                log.flush()
                report(progress)
                if time.monotonic() - saved > self.settings.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def timed_step(self) -> Progress:
        """One step with its clock, learning rate and counts."""
        start = time.monotonic()
        rate = learning_rate(self.settings, self.step, self.seconds / (self.settings.hours * 3600))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, norm = self.train_step()
        elapsed = time.monotonic() - start
        count = self.settings.batch * self.settings.window
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + count, self.seconds + elapsed
        return Progress(self.step, self.tokens, self.seconds, loss, rate, norm, count / elapsed)

    def source_names(self) -> list[str]:
        """`DOMAIN/SOURCE` of every source, in order."""
        return [f"{s.domain}/{s.name}" for s in self.sources]

    def summary(self) -> dict[str, Any]:
        """What a checkpoint says about its training."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds),
            "sources": self.source_names(),
            "settings": dataclasses.asdict(self.settings),
        }

    def save(self) -> None:
        """Write `model.safetensors` (weights, for export) and `resume.pt` (everything, to go on)."""
        save_checkpoint(
            self.folder / "model.safetensors", parameters(self.model), self.config, self.tokenizer_json, self.summary()
        )
        content = {
            "config": self.config.to_json(),
            "sources": self.source_names(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "lanes": self.lanes.state(),
            "rng": json.dumps(self.rng.bit_generator.state),
            "counts": [self.step, self.tokens, self.seconds],
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_atomically(self.folder / "resume.pt", buffer.getvalue())

    def resume(self) -> None:
        """Continue from `resume.pt`.

        Raises:
            CheckpointError: the file is damaged or belongs to a run of another configuration or on other sources.
        """
        path = self.folder / "resume.pt"
        try:
            content = torch.load(path, weights_only=True)
            config = content["config"]
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged. Remove it to train from the start.") from error
        if config != self.config.to_json():
            raise CheckpointError(f"{self.folder} holds a run of another configuration. Choose another folder.")
        if content.get("sources") != self.source_names():
            raise CheckpointError(f"{self.folder} holds a run on other sources. Choose another folder.")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.state = content["state"]
        self.lanes.restore(content["lanes"])
        self.rng.bit_generator.state = json.loads(content["rng"])
        self.step, self.tokens, self.seconds = content["counts"]


def validate(model: Hope, sources: list[Source], length: int = 8192, window: int = 512) -> dict[str, float]:
    """Streaming cross-entropy in nats a token on each source's held-out tail, memory carried throughout.

    Sources whose tail has no more than `length` tokens are left out. All products are in float32, without the
    shortcuts of training.
    """
    usable = [s for s in sources if len(s.validation) > length]
    if not usable:
        return {}
    tokens = torch.from_numpy(np.stack([s.validation[: length + 1].astype(np.int64) for s in usable]))
    torch.set_float32_matmul_precision("highest")
    plain = Hope(model.config)
    plain.load_state_dict(model.state_dict())
    state = plain.zeros(len(usable))
    total = torch.zeros(len(usable))
    with torch.no_grad():
        for start in range(0, length, window):
            part = tokens[:, start : start + window + 1]
            nats, state = plain.loss(part[:, :-1], part[:, 1:], state)
            total += nats.sum(1)
    return {s.name: float(t) / length for s, t in zip(usable, total, strict=True)}
