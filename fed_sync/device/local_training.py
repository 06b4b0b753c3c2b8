"""A device's own step: train the rules on its recent text, clip the difference, add noise, encode."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fednl_runtime.backend import Backend
from fednl_runtime.errors import RequestError
from fednl_runtime.fed_sync.update import ClientUpdate, Encoded, Schema, encode
from fednl_runtime.rule_training import Gradients, RuleProgress, RuleSettings, train_rules
from fednl_runtime.rules import RuleSet, Shapes
from fednl_runtime.state import Tokens


class StoppedError(Exception):
    """The agent was told to stop while it trained."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model in the agent's own hands; `gradients` is None if it has no gradient graph."""

    backend: Backend
    gradients: Gradients | None


class LocalModel(Protocol):
    """The device's model as the agent uses it."""

    shapes: Shapes
    fingerprint: str

    def opened(self) -> contextlib.AbstractContextManager[Opened]:
        """The model, loaded for as long as the block runs."""


class OnnxModel:
    """A model file, loaded with one thread while it is needed: the thread that asks, at its low priority."""

    def __init__(self, path: Path, shapes: Shapes, fingerprint: str) -> None:
        self.path, self.shapes, self.fingerprint = path, shapes, fingerprint

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        """The model and, if there is one beside it, its gradient graph. Raises ModelFileError, RulesError."""
        from fednl_runtime.gradient_backend import load_gradients
        from fednl_runtime.onnx_backend import load
        from fednl_runtime.rules import gradients_path

        trains = gradients_path(self.path).is_file()
        yield Opened(load(self.path, 1), load_gradients(self.path, 1) if trains else None)


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What training found: new rules, the tokens they were trained on, held-out losses before and after."""

    rules: RuleSet
    num_tokens: int
    before: float
    after: float


Train = Callable[[Opened, RuleSet, Tokens, Callable[[], bool]], Learnt | None]
"""Trains on a text until it is done or the last argument says to stop; None if nothing was learnt."""


def train_locally(settings: RuleSettings) -> Train:
    """Training through the gradient graph."""

    def train(model: Opened, rules: RuleSet, tokens: Tokens, stopped: Callable[[], bool]) -> Learnt | None:
        def report(_: RuleProgress) -> None:
            if stopped():
                raise StoppedError

        assert model.gradients is not None
        try:
            found, told = train_rules(model.gradients, model.backend, rules, tokens, settings, report)
        except RequestError:  # too little text
            return None
        if told.best_step == 0:
            return None
        return Learnt(found, min(told.tokens, told.train_tokens), told.held_out_before, told.held_out_after)

    return train


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the endpoint asks of an update."""

    clip_norm: float
    sigma: float
    max_tokens: int


def make_update(
    learnt: Learnt,
    base: RuleSet,
    base_version: int,
    residual: Mapping[str, NDArray[np.float32]],
    terms: Terms,
    agent_version: str,
    encoding: str,
    rng: np.random.Generator,
) -> tuple[ClientUpdate, Encoded]:
    """The update of what was learnt, and its body with the residual that is left.

    The difference and what earlier encodings left out are clipped together to `clip_norm`, then noise of standard
    deviation `sigma` goes to each number, so that what leaves is bounded and noised whatever was learnt.
    """
    schema = Schema(base.shapes, base.schema_hash)
    known = {name: residual.get(name, np.float32(0)) for name in schema.names}
    moved = {name: learnt.rules.tensors[name] - base.tensors[name] + known[name] for name in schema.names}
    vector = schema.vector(moved)
    length = float(np.linalg.norm(vector))
    vector *= min(1.0, terms.clip_norm / length) if length else 1.0
    if terms.sigma:
        vector += rng.normal(0.0, terms.sigma, schema.size)
    update = ClientUpdate(
        schema=schema.hash,
        base_version=base_version,
        num_tokens=max(1, min(learnt.num_tokens, terms.max_tokens)),
        clip_norm=terms.clip_norm,
        sigma=terms.sigma,
        agent_version=agent_version,
        delta=schema.tensors(vector),
    )
    return update, encode(update, schema, encoding)
