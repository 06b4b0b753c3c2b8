"""The device's side of a Flower run: each letter is one contact with the fleet, on the device's own folder."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fednl_runtime.fed_sync.device.folder import Device
from fednl_runtime.fed_sync.device.local_training import LocalModel, OnnxModel
from fednl_runtime.fed_sync.device.participant import SyncSettings
from fednl_runtime.fed_sync.flower.letters import answers_in, reply
from fednl_runtime.fed_sync.flower.mailbox import Correspondent, Mailbox, exchange
from fednl_runtime.model_file import default_model_path


@contextlib.contextmanager
def opened(config: Mapping[str, Any]) -> Iterator[tuple[Device, LocalModel]]:
    """The folder and the model that a node's configuration names, for as long as the block runs.

    Raises:
        ModelFileError, StoreError: they cannot be used.
        SyncError: another agent uses the folder.
    """
    from fednl_runtime.onnx_backend import load
    from fednl_runtime.tokenizer import Tokenizer

    path = Path(str(config["model"])) if "model" in config else default_model_path()
    backend = load(path, 1)
    end = Tokenizer(backend.tokenizer_json, backend.config.vocab_size).end_of_text
    with contextlib.closing(Device(Path(str(config["device"])), end)) as device, device.only_agent():
        yield device, OnnxModel(path, backend.model.rules, backend.fingerprint)


def settings_of(config: Mapping[str, Any]) -> SyncSettings:
    """How a node trains: `steps`, `minutes` and `cpu-share`, from `least-tokens` of recent text on."""
    known = SyncSettings()
    training = dataclasses.replace(
        known.training,
        steps=int(config.get("steps", known.training.steps)),
        minutes=float(config.get("minutes", 5)),
        cpu_share=float(config.get("cpu-share", known.training.cpu_share)),
    )
    least = int(config.get("least-tokens", known.least_tokens))
    return dataclasses.replace(known, training=training, least_tokens=least)


def contact(message: Message, context: Context) -> Message:
    """One contact: take what became of the last update and the new rules, train where terms came, send what waits.

    Raises:
        FednlError: the device cannot take part; Flower reports it to the fleet as a failed reply.
    """
    config = context.node_config
    with opened(config) as (device, model):
        mailbox = Mailbox(answers_in(message), device.key, time.time)
        population = str(config.get("population", "default"))
        part = Correspondent(device, population, model, mailbox, time.time, settings_of(config))
        return Message(reply(*exchange(part, mailbox)), reply_to=message)


app = ClientApp()
app.train()(contact)
app.evaluate()(contact)
