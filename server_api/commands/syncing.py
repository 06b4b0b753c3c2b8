"""A device's part in a federation, as the command line sets it up: beside a server, or alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fednl_runtime.model_file import ModelFile
from fednl_runtime.server_api.commands.local import engine_on
from fednl_runtime.server_api.commands.state_dir import NAME_LENGTH
from fednl_runtime.session import SessionKey
from fednl_runtime.state import Array

if TYPE_CHECKING:
    from fednl_runtime.engine import Engine, EngineLimits
    from fednl_runtime.fed_sync.device.agent import Agent
    from fednl_runtime.fed_sync.device.folder import Device
    from fednl_runtime.onnx_backend import OnnxBackend


@dataclasses.dataclass(frozen=True)
class SyncOptions:
    """What the device's owner says."""

    sync: str | None = None
    """Address of the endpoint; None keeps the device out of any federation."""
    sync_population: str = "default"
    sync_token: str | None = None
    sync_manifest_key: str | None = None
    sync_interval: float = 3600.0
    sync_cpu_share: float = 0.25
    sync_min_text: int = 4096
    sync_steps: int = 200
    sync_quiet: str | None = None
    sync_metered: bool = False
    sync_on_battery: bool = False
    sync_idle: bool = False
    sync_clip: float | None = None
    sync_noise: float = 0.0
    sync_encoding: str = "int8"
    sync_bytes: int = 16 << 20
    sync_text: int = 1 << 20


class Forgetting:
    """The journal of a server that does not sync: nothing is recorded, and what was recorded before is forgotten."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, key: SessionKey, tokens: tuple[int, ...]) -> None:
        """Keep nothing."""

    def forget(self, key: SessionKey) -> None:
        """Delete what an earlier run kept of a session. Raises StoreError."""
        self._device.forget(key)


def sync_folder(state_dir: Path, fingerprint: str) -> Path:
    """Where a device keeps what it needs to sync the rules of one model."""
    return state_dir / "sync" / fingerprint[:NAME_LENGTH]


@contextlib.contextmanager
def opened_device(folder: Path, end_of_text: int, options: SyncOptions) -> Iterator[Device | None]:
    """The device's folder; None if it does not sync and never did. Raises StoreError, SyncError."""
    if options.sync is None and not folder.exists():
        yield None
        return
    from fednl_runtime.fed_sync.device.folder import Device

    with contextlib.closing(Device(folder, end_of_text, options.sync_text)) as device:
        yield device


def agent_of(
    device: Device,
    model: ModelFile,
    path: Path,
    options: SyncOptions,
    use_rules: Callable[[Mapping[str, Array]], None] = lambda _: None,
    busy: Callable[[], bool] = lambda: False,
) -> Agent:
    """The agent of a device with the model file at `path`; the rules that are live already are used at once.

    Raises:
        SyncError: the device cannot follow the options.
    """
    from fednl_runtime.fed_sync.device.agent import Agent
    from fednl_runtime.fed_sync.device.conditions import DeviceConditions, QuietHours
    from fednl_runtime.fed_sync.device.folder import Invitation
    from fednl_runtime.fed_sync.device.local_training import OnnxModel
    from fednl_runtime.fed_sync.device.participant import Participant, SyncSettings
    from fednl_runtime.fed_sync.device.schedule import Pace
    from fednl_runtime.rule_training import RuleSettings

    assert options.sync is not None, "who has an agent syncs"
    participant = Participant(
        device,
        Invitation(options.sync, options.sync_population, options.sync_token, options.sync_manifest_key),
        OnnxModel(path, model.rules, model.fingerprint),
        use_rules,
        time.time,
        SyncSettings(
            training=RuleSettings(
                steps=options.sync_steps,
                minutes=30,
                check_every=min(50, options.sync_steps),
                cpu_share=options.sync_cpu_share,
            ),
            least_tokens=options.sync_min_text,
            encoding=options.sync_encoding,
            clip_norm=math.inf if options.sync_clip is None else options.sync_clip,
            sigma=options.sync_noise,
            bytes_per_day=options.sync_bytes,
        ),
    )
    conditions = DeviceConditions(
        quiet=QuietHours.parse(options.sync_quiet) if options.sync_quiet else None,
        metered=options.sync_metered,
        needs_power=not options.sync_on_battery,
        busy=busy if options.sync_idle else lambda: False,
    )
    return Agent(participant, conditions, Pace(interval_s=options.sync_interval))


@contextlib.contextmanager
def running(agent: Agent, device: Device) -> Iterator[Agent]:
    """Run an agent in its thread for as long as the block runs. Raises SyncError if the folder has one already."""
    with device.only_agent():
        agent.start()
        try:
            yield agent
        finally:
            agent.stop()


def use_live_rules(engine: Engine, folder: Path, model: ModelFile) -> None:
    """Use the rules that are live in a device's folder, if there are any."""
    from fednl_runtime.fed_sync.device.live_rules import LiveRules

    live = LiveRules(folder, model.rules, model.fingerprint).live()
    if live is not None:
        engine.use_rules(live.rules.tensors)


def is_busy(engine: Engine) -> bool:
    """Whether turns run or wait."""
    return any(engine.scheduler.load())


@contextlib.contextmanager
def synced_engine(
    backend: OnnxBackend,
    path: Path,
    limits: EngineLimits,
    folder: Path | None,
    options: SyncOptions,
    use_live: bool = True,
) -> Iterator[tuple[Engine, Agent | None]]:
    """An engine that keeps its sessions in `folder`, and the agent beside it if the options name an endpoint.

    A server that does not sync still uses the rules that an earlier run made live, unless `use_live` is false,
    and forgets with a session what that run recorded of it.

    Raises:
        StoreError, SyncError: a folder cannot be used, or the device cannot follow the options.
        click.UsageError: there is no folder to sync in.
    """
    if folder is None:
        if options.sync is not None:
            raise click.UsageError("--sync keeps what it learns in the state folder; leave --in-memory out.")
        with engine_on(backend, limits) as engine:
            engine.calibrate()
            yield engine, None
        return
    from fednl_runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    own = sync_folder(folder.parent.parent, backend.fingerprint)
    with opened_device(own, tokenizer.end_of_text, options) as device, contextlib.ExitStack() as stack:
        journal = None if device is None else device if options.sync else Forgetting(device)
        engine = stack.enter_context(engine_on(backend, limits, folder, journal))
        engine.calibrate()
        agent = None
        if device is not None and options.sync is not None:
            busy = functools.partial(is_busy, engine)
            agent = agent_of(device, backend.model, path, options, engine.use_rules, busy)
            stack.enter_context(running(agent, device))
        elif device is not None and use_live:
            use_live_rules(engine, own, backend.model)
        yield engine, agent
