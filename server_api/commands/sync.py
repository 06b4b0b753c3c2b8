"""Commands of a device that takes part in a federation: enrol, run alone, look, flush, pause."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.server_api.commands.local import FILE, Command, duration, size
from fednl_runtime.server_api.commands.model import print_json, print_table
from fednl_runtime.server_api.commands.sessions import ask, connected, server_option
from fednl_runtime.server_api.commands.syncing import SyncOptions

if TYPE_CHECKING:
    from fednl_runtime.fed_sync.device.folder import Device
    from fednl_runtime.onnx_backend import OnnxBackend

STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of what the device keeps [default: as for serve].",
)
MODEL = click.option("--model", type=FILE, help="Model file [default: the shipped model].")
SHARE = click.FloatRange(0, 1, min_open=True)


def quiet_hours(text: str) -> str:
    """Hours as 22:00-06:30. Raises click.BadParameter."""
    from fednl_runtime.fed_sync.device.conditions import QuietHours

    try:
        QuietHours.parse(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} are no hours; write 22:00-06:30.") from error
    return text


def sync_options(command: Command) -> Command:
    """The options of a device that takes part; their names are the fields of `SyncOptions`."""
    options = [
        click.option(
            "--sync", metavar="URL", help="Aggregation endpoint to share learning rules with [default: none]."
        ),
        click.option("--sync-population", default="default", show_default=True, help="The fleet's name."),
        click.option("--sync-token", help="One-time token, to enrol at the first contact."),
        click.option("--sync-manifest-key", help="Key that rules must be signed by [default: told at enrolment]."),
        click.option("--sync-interval", type=duration, default="1h", show_default=True, help="Time between contacts."),
        click.option("--sync-cpu-share", type=SHARE, default=0.25, show_default=True, help="Of one core, in training."),
        click.option(
            "--sync-min-text", type=click.IntRange(1), default=4096, show_default=True, help="Tokens to train."
        ),
        click.option("--sync-steps", type=click.IntRange(1), default=200, show_default=True, help="Of a training."),
        click.option("--sync-quiet", type=quiet_hours, help="Hours of the day to keep still in, as 22:00-06:30."),
        click.option("--sync-metered", is_flag=True, help="The link costs money: keep still."),
        click.option("--sync-on-battery", is_flag=True, help="Train and send on battery too."),
        click.option("--sync-idle", is_flag=True, help="Train and send only while no turn runs."),
        click.option("--sync-clip", type=click.FloatRange(0, min_open=True), help="Largest norm that leaves."),
        click.option("--sync-noise", type=click.FloatRange(0), default=0.0, help="Std of noise on what leaves."),
        click.option(
            "--sync-encoding",
            type=click.Choice(["f32", "f16", "int8", "topk"]),
            default="int8",
            show_default=True,
            help="Form of what leaves.",
        ),
        click.option("--sync-bytes", type=size, default="16M", show_default=True, help="Bytes a day on the link."),
        click.option("--sync-text", type=size, default="1M", show_default=True, help="Recent text kept to train on."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def taken(options: dict[str, Any]) -> SyncOptions:
    """Take the options of `sync_options` out of a command's options."""
    names = [field.name for field in dataclasses.fields(SyncOptions)]
    return SyncOptions(**{name: options.pop(name) for name in names if name in options})


@click.group()
def sync() -> None:
    """Share learning rules with a fleet: enrol, run alone, or look after a server started with --sync."""


@sync.command()
@click.argument("url", metavar="URL")
@click.option("--token", required=True, help="One-time token from the fleet's operator.")
@click.option("--population", default="default", show_default=True, help="The fleet's name.")
@click.option("--manifest-key", help="Key that rules must be signed by [default: the one the endpoint tells].")
@MODEL
@STATE_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def enrol(
    url: str,
    token: str,
    population: str,
    manifest_key: str | None,
    model: Path | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Make this device a member of the fleet at URL."""
    from fednl_runtime.fed_sync.device.client import Endpoint, checked_url
    from fednl_runtime.fed_sync.device.folder import Invitation, joined
    from fednl_runtime.fed_sync.device.participant import Exchange

    options = SyncOptions(sync=url)
    with device_of(model, state_dir, options) as (device, _, _):
        invitation = Invitation(checked_url(url), population, token, manifest_key)
        invitation.check(device)
        exchange = Exchange(device, Endpoint(invitation.url, device.key, time.time), time.time)
        found = joined(device, invitation, exchange.ask)
    told = {"device_id": found.device_id, "population": found.population, "manifest_keys": list(found.manifest_keys)}
    print_json(told) if as_json else print_table("Enrolled", told)


@sync.command()
@sync_options
@click.option("--text", type=FILE, help="Text to train on besides what servers recorded.")
@click.option("--once", is_flag=True, help="Make one contact now, and end.")
@MODEL
@STATE_DIR
def run(text: Path | None, once: bool, model: Path | None, state_dir: Path | None, **options: Any) -> None:
    """Sync without a server, on the text that servers recorded or that --text names; rules go to the next server."""
    from fednl_runtime.server_api.commands.syncing import agent_of, running

    given = taken(options)
    if given.sync is None:
        raise click.UsageError("Name the endpoint with --sync URL.")
    with device_of(model, state_dir, given) as (device, backend, path):
        if text is not None:
            record(device, backend, text)
        agent = agent_of(device, backend.model, path, given)
        if once:
            with device.only_agent():
                agent.flush()
                agent.tick()
            show(agent.status(), False)
            raise SystemExit(1 if agent.status()["last_error"] else 0)
        with running(agent, device), contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


@contextlib.contextmanager
def device_of(
    model: Path | None, state_dir: Path | None, options: SyncOptions
) -> Iterator[tuple[Device, OnnxBackend, Path]]:
    """The device's folder for a model, the loaded model and its path."""
    from fednl_runtime.model_file import default_model_path
    from fednl_runtime.onnx_backend import load
    from fednl_runtime.server_api.commands.state_dir import default_state_dir
    from fednl_runtime.server_api.commands.syncing import opened_device, sync_folder
    from fednl_runtime.tokenizer import Tokenizer

    path = model or default_model_path()
    backend = load(path, 1)
    end = Tokenizer(backend.tokenizer_json, backend.config.vocab_size).end_of_text
    folder = sync_folder(state_dir or default_state_dir(), backend.fingerprint)
    with opened_device(folder, end, options) as device:
        assert device is not None, "who names an endpoint has a folder"
        yield device, backend, path


def record(device: Device, backend: OnnxBackend, path: Path) -> None:
    """Keep a text file as recent text, in the place of what was kept of it before. Raises RequestError."""
    from fednl_runtime.corpus import encode_documents, read_text
    from fednl_runtime.session import SessionKey
    from fednl_runtime.tokenizer import Tokenizer

    tokens = encode_documents(Tokenizer(backend.tokenizer_json, backend.config.vocab_size), read_text(path))
    key = SessionKey("file", str(path.resolve()))
    device.recent.forget(key)
    device.record(key, tuple(tokens.tolist()))


def over_http(method: str, action: str) -> click.Command:
    """A command that asks a running server for one of the routes of its agent."""
    helps = {
        "status": "Tell what the agent of a running server did, does and will do.",
        "flush": "Have it contact the endpoint now.",
        "pause": "Have it contact and train no more, over restarts too.",
        "resume": "Have it go on.",
    }

    @click.command(action, help=helps[action])
    @server_option
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    def command(server: str, as_json: bool) -> None:
        with connected(server) as client:
            show(ask(client, method, f"/v1/sync/{action}"), as_json)

    return command


def show(status: dict[str, Any], as_json: bool) -> None:
    """Print a status."""
    if as_json:
        print_json(status)
        return
    updates = status.pop("updates")
    print_table("Sync", {name: value for name, value in status.items() if value is not None})
    rows = {u["id"]: f"{u['state']}, version {u['base_version']}, {u['num_tokens']} tokens" for u in updates}
    if rows:
        print_table("Updates", rows)


for _command in (over_http("GET", "status"), *(over_http("POST", name) for name in ("flush", "pause", "resume"))):
    sync.add_command(_command)
