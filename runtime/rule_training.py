"""Training rules on the device: truncated back-propagation over a text, AdamW in NumPy, a share of the CPU."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from fednl_runtime.backend import LEARN, Backend
from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import RequestError
from fednl_runtime.evaluate import stream
from fednl_runtime.rules import RuleSet, in_range
from fednl_runtime.state import MemoryState, Tensors, Tokens

Result = TypeVar("Result")


class Gradients(Protocol):
    """What computes loss and gradients: `gradient_backend.GradientGraph`."""

    config: HopeConfig
    segment: int

    def step(self, rules: Tensors, tokens: Tokens, state: MemoryState) -> tuple[float, Tensors, MemoryState]:
        """Mean loss of tokens `[T + 1]` after the first, its gradient by every rule, and the next state."""


@dataclasses.dataclass(frozen=True)
class RuleSettings:
    """How to train; lengths in tokens. Training ends at whichever comes first: steps, minutes, or patience."""

    steps: int = 400
    minutes: float = math.inf
    learning_rate: float = 3e-3
    window: int = 256
    """Tokens that one step back-propagates through."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    """Pull toward the rules that training began with, per step and unit of learning rate."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    warmup: int = 20
    cpu_share: float = 1.0
    held_out: float = 0.2
    """Share of the text, at its end, that is never trained on and decides which rules are best."""
    held_out_most: int = 16384
    check_every: int = 50
    """Steps between two measurements on the held-out text."""
    patience: int = 3
    """Measurements without a new best after which training stops."""


@dataclasses.dataclass(frozen=True)
class RuleProgress:
    """One step: loss in nats a token, and the held-out loss where it was measured."""

    step: int
    seconds: float
    loss: float
    gradient_norm: float
    held_out: float | None


@dataclasses.dataclass(frozen=True)
class RuleReport:
    """What training did; losses are streaming cross-entropy in nats a token from an empty memory."""

    steps: int
    skipped: int
    """Steps whose loss or gradient was not finite."""
    best_step: int
    tokens: int
    """Tokens read in training; a text shorter than this was read more than once."""
    train_tokens: int
    held_out_tokens: int
    held_out_before: float
    held_out_after: float
    """Of the rules that are returned: never above `held_out_before`."""
    seconds: float
    busy_seconds: float
    ms_per_step: float
    peak_rss_bytes: int
    """Of the whole process so far; 0 where the system does not tell."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return dataclasses.asdict(self)


class AdamW:
    """AdamW (arXiv 1711.05101) whose decay pulls toward the starting values, with the moments as its state."""

    def __init__(self, start: Tensors, settings: RuleSettings) -> None:
        self.settings, self.start, self.count = settings, start, 0
        self.first = {name: np.zeros_like(value) for name, value in start.items()}
        self.second = {name: np.zeros_like(value) for name, value in start.items()}

    def step(self, rules: Tensors, gradients: Tensors) -> Tensors:
        """The rules after one step, each in its safe range."""
        self.count += 1
        s, (beta1, beta2) = self.settings, self.settings.betas
        rate = s.learning_rate * min(1.0, self.count / s.warmup)
        new = {}
        for name, g in gradients.items():
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * g * g
            mean, square = self.first[name] / (1 - beta1**self.count), self.second[name] / (1 - beta2**self.count)
            step = mean / (np.sqrt(square) + 1e-8) + s.weight_decay * (rules[name] - self.start[name])
            new[name] = np.asarray(in_range(name, rules[name] - rate * step), np.float32)
        return new


def clipped(gradients: Tensors, limit: float) -> tuple[Tensors, float]:
    """Gradients scaled to a global norm of at most `limit`, and the norm that they had."""
    norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values()))
    scale = np.float32(min(1.0, limit / norm) if norm else 1.0)
    return {name: g * scale for name, g in gradients.items()}, norm


def peak_rss() -> int:
    """Largest resident memory of this process so far in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def windows(tokens: Tokens, length: int) -> Iterator[tuple[Tokens, bool]]:
    """Windows `[T + 1]` of a text over and over, and whether each begins the text."""
    while True:
        for start in range(0, len(tokens) - length, length):
            yield tokens[start : start + length + 1], start == 0


def split(tokens: Tokens, settings: RuleSettings) -> tuple[Tokens, Tokens]:
    """The part to train on, and the held-out end of a text.

    Raises:
        RequestError: the text is too short for one window of each.
    """
    held = min(int(len(tokens) * settings.held_out), settings.held_out_most)
    train, held_out = tokens[: len(tokens) - held], tokens[len(tokens) - held :]
    if len(train) <= settings.window or len(held_out) <= settings.window:
        raise RequestError(
            f"The text has {len(tokens)} tokens, too few to train rules on. Give at least "
            f"{math.ceil((settings.window + 1) / min(settings.held_out, 1 - settings.held_out))}."
        )
    return train, held_out


def held_out_loss(backend: Backend, rules: Tensors, tokens: Tokens) -> float:
    """Streaming cross-entropy of tokens `[T + 1]` under some rules, from an empty memory, nats a token."""
    adapt = np.array([LEARN], np.float32)
    return float(stream(backend.with_rules(rules), tokens[None], lambda _: adapt, lambda _: None).mean())


def train_rules(
    gradients: Gradients,
    backend: Backend,
    rules: RuleSet,
    tokens: Tokens,
    settings: RuleSettings | None = None,
    report: Callable[[RuleProgress], None] = lambda _: None,
) -> tuple[RuleSet, RuleReport]:
    """Train `rules` on a text of token ids, read in order with its memory carried from step to step.

    The end of the text is held out; the rules returned are those with the lowest streaming cross-entropy on
    it, which are the given ones if none is better.

    Raises:
        RequestError: the text is too short.
    """
    s = settings or RuleSettings()
    train, held_out = split(tokens, s)
    run = _Run(gradients, backend, rules.tensors, held_out, s)
    before = run.best
    for window, first in windows(train, s.window):
        if run.finished():
            break
        report(run.step(window, first))
    run.check()
    length = s.window * run.steps
    return RuleSet(run.best_rules, rules.fingerprint), RuleReport(
        run.steps, run.skipped, run.best_step, length, len(train), len(held_out), before, run.best,
        time.monotonic() - run.started, run.busy, 1000 * run.stepping / max(run.steps, 1), peak_rss(),
    )  # fmt: skip


class _Run:
    """One training run: current and best rules, and the clocks."""

    def __init__(
        self, gradients: Gradients, backend: Backend, rules: Tensors, held_out: Tokens, settings: RuleSettings
    ) -> None:
        self.gradients, self.backend, self.held_out, self.settings = gradients, backend, held_out, settings
        self.rules, self.optimizer = rules, AdamW(rules, settings)
        self.state = MemoryState.zeros(gradients.config)
        self.steps = self.skipped = self.best_step = self.checked = self.worse = 0
        self.started, self.busy, self.stepping = time.monotonic(), 0.0, 0.0
        self.best, self.best_rules = math.inf, rules
        self._timed(self._measure)

    def finished(self) -> bool:
        """Whether steps, time or patience are spent."""
        s = self.settings
        spent = time.monotonic() - self.started >= 60 * s.minutes
        return spent or self.steps >= s.steps or self.worse >= s.patience

    def step(self, window: Tokens, first: bool) -> RuleProgress:
        """One optimiser step, and a measurement where one is due."""
        if first:
            self.state = MemoryState.zeros(self.gradients.config)
        loss, norm = self._timed(lambda: self._update(window))
        held_out = self.check() if self.steps % self.settings.check_every == 0 else None
        return RuleProgress(self.steps, time.monotonic() - self.started, loss, norm, held_out)

    def check(self) -> float | None:
        """The held-out loss of the current rules, unless it is known."""
        return self._timed(self._measure) if self.checked < self.steps else None

    def _update(self, window: Tokens) -> tuple[float, float]:
        start = time.monotonic()
        loss, gradients, state = self.gradients.step(self.rules, window, self.state)
        gradients, norm = clipped(gradients, self.settings.clip)
        self.steps += 1
        if math.isfinite(loss) and math.isfinite(norm):
            self.rules, self.state = self.optimizer.step(self.rules, gradients), state
        else:
            self.skipped += 1
            self.state = MemoryState.zeros(self.gradients.config)
        self.stepping += time.monotonic() - start
        return loss, norm

    def _measure(self) -> float:
        loss = held_out_loss(self.backend, self.rules, self.held_out)
        self.checked, self.worse = self.steps, self.worse + 1
        if loss < self.best:
            self.best, self.best_rules, self.best_step, self.worse = loss, self.rules, self.steps, 0
        return loss

    def _timed(self, work: Callable[[], Result]) -> Result:
        """Do some work, then rest so that work takes no more than its share of the time."""
        start = time.monotonic()
        result = work()
        spent = time.monotonic() - start
        self.busy += spent
        if self.settings.cpu_share < 1:
            time.sleep(spent * (1 / self.settings.cpu_share - 1))
        return result
