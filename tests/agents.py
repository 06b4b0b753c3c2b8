"""Devices that sync with a real endpoint, with a model small enough to judge and train in no time."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from models import TINY
from updates import RULES, SCHEMA

from fednl_runtime.fed_sync.device.folder import Device, Invitation
from fednl_runtime.fed_sync.device.local_training import Learnt, Opened
from fednl_runtime.fed_sync.device.participant import Participant, SyncSettings
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.fleet.endpoint import create_app
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.rules import RuleSet
from fednl_runtime.server_api.commands.serve import listen
from fednl_runtime.session import SessionKey
from fednl_runtime.state import MemoryState

END = 1
ANNA = SessionKey("", "anna")
SETTINGS = SyncSettings(least_tokens=8, encoding="f32")


@dataclasses.dataclass
class TinyStream:
    """Thinks that token 0 comes next, the more so the higher rule b_eta is."""

    level: float

    def feed(self, tokens: Any, adapt: Any, first: int = 0) -> Any:
        logits = np.zeros((*tokens.shape, TINY.vocab_size), np.float32)
        logits[..., 0] = self.level if self.level < 1e30 else np.nan
        return logits


@dataclasses.dataclass
class TinyBackend:
    """A model whose surprise at a text of zeros falls with rule b_eta; segments of 64 tokens."""

    level: float = 0.25
    config: Any = TINY
    segment: int = 64

    def with_rules(self, rules: Any) -> TinyBackend:
        return TinyBackend(float(rules["rule.0.b_eta"][0])) if rules else self

    def open(self, state: MemoryState) -> TinyStream:
        return TinyStream(self.level)


class TinyModel:
    """The model as an agent uses it."""

    shapes = RULES.shapes
    fingerprint = RULES.fingerprint

    def __init__(self, gradients: object | None = True) -> None:
        self.gradients = gradients

    @contextlib.contextmanager
    def opened(self) -> Iterator[Opened]:
        yield Opened(TinyBackend(), self.gradients)


def learning(index: int, value: float = 0.01) -> Callable[..., Learnt | None]:
    """Training that always moves one number of the rules by the same amount."""

    def train(model: Opened, rules: RuleSet, tokens: Any, stopped: Callable[[], bool]) -> Learnt:
        step = np.zeros(SCHEMA.size)
        step[index] = value
        tensors = {name: rules.tensors[name] + delta for name, delta in SCHEMA.tensors(step).items()}
        return Learnt(RuleSet(tensors, rules.fingerprint), len(tokens), 2.0, 1.9)

    return train


class Phone:
    """A device of a test: its folder, what it was told to use, and its part in the fleet."""

    def __init__(
        self,
        folder: Path,
        url: str,
        clock: Callable[[], float],
        token: str | None = None,
        index: int = 0,
        settings: SyncSettings = SETTINGS,
        text: int = 100,
        **options: Any,
    ) -> None:
        self.device = Device(folder, END)
        self.used: list[dict[str, Any]] = []
        if text and not self.device.recent.tokens():
            self.read(text)
        options = {"train": learning(index), "model": TinyModel(), "request_s": 20.0, **options}
        invitation = options.pop("invitation", Invitation(url, "p", token))
        try:
            self.part = Participant(
                self.device, invitation, use_rules=self.used.append, clock=clock, settings=settings, **options
            )
        except BaseException:
            self.close()
            raise

    def read(self, tokens: int, token: int = 0) -> None:
        """Have a session read a text of one token over and over."""
        self.device.record(ANNA, (token,) * tokens)

    def contact(self) -> tuple[float, float] | None:
        return self.part.contact(lambda: False)

    def close(self) -> None:
        self.device.close()


@contextlib.contextmanager
def endpoint_of(fleet: Fleet) -> Iterator[str]:
    """The address of an endpoint around a fleet."""
    server = uvicorn.Server(uvicorn.Config(create_app(fleet), log_level="critical", ws="none"))
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def phone_of(fleet: Fleet, url: str, folder: Path, **options: Any) -> Iterator[Phone]:
    """A phone with a token of its own, closed at the end."""
    phone = Phone(folder, url, options.pop("clock", fleet.clock), intake.new_token(fleet), **options)
    with contextlib.closing(phone):
        yield phone


def pending(fleet: Fleet) -> list[str]:
    """The ids of updates that wait for the open round to close."""
    with fleet.repository.read() as records:
        return [update.id for update in records.pending(fleet.population)]
