"""The commands of a fleet's operator: serve the aggregation endpoint, let devices in, look at rounds, step in."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.server_api.commands.local import FILE

if TYPE_CHECKING:
    from fednl_runtime.fed_sync.fleet.policy import Policy
    from fednl_runtime.fed_sync.fleet.population import Fleet
    from fednl_runtime.rules import RuleSet

ADMIN_VARIABLE = "FEDNL_ADMIN_TOKEN"
SIGNING_KEY = "signing.key"
FOLDER = click.Path(file_okay=False, path_type=Path)
POSITIVE = click.FloatRange(0, min_open=True)
WHERE = (
    click.option("--state-dir", type=FOLDER, required=True, help="Folder of the signing key, rules and uploads."),
    click.option("--database", metavar="URL", help="SQLAlchemy URL [default: fleet.db in the state folder]."),
    click.option("--population", default="default", show_default=True, help="Name of the fleet."),
)
ROUNDS = (
    click.option("--goal", type=click.IntRange(1), default=10, show_default=True, help="Updates that close a round."),
    click.option("--minimum", type=click.IntRange(1), default=3, show_default=True, help="Enough at the deadline."),
    click.option("--deadline", type=POSITIVE, default=86_400.0, show_default=True, help="Seconds of a round."),
    click.option("--staleness", type=click.IntRange(0), default=2, show_default=True, help="Versions a base may lag."),
    click.option("--clip", type=POSITIVE, default=1.0, show_default=True, help="Norm of an update."),
    click.option("--local-noise", type=click.FloatRange(0), default=0.0, help="Std of noise that devices add."),
    click.option(
        "--rule",
        type=click.Choice(("mean", "trimmed_mean", "median", "multi_krum")),
        default="mean",
        show_default=True,
        help="How a round aggregates.",
    ),
    click.option("--faulty", type=click.IntRange(0), default=0, help="Liars that a robust rule withstands."),
    click.option("--optimizer", type=click.Choice(("none", "momentum", "adam")), default="none", show_default=True),
    click.option("--lr", type=POSITIVE, default=1.0, show_default=True, help="Step size of the server."),
    click.option("--max-step", type=POSITIVE, default=10.0, show_default=True, help="Larger steps: quarantine."),
    click.option("--noise-multiplier", type=click.FloatRange(0), default=0.0, help="Central privacy; 0 is off."),
    click.option("--max-epsilon", type=POSITIVE, default=8.0, show_default=True, help="The privacy budget."),
    click.option("--sync-every", type=POSITIVE, default=600.0, show_default=True, help="Seconds between contacts."),
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that adds options in their order."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group()
def aggregator() -> None:
    """Run the aggregation endpoint of a fleet (pip install 'fednl-runtime[aggregator]')."""


def fleet_at(state_dir: Path, database: str | None, population: str) -> Fleet:
    """The fleet of a state folder, which is made if it is missing."""
    from fednl_runtime.fed_sync.fleet.blobs import DiskBlobs
    from fednl_runtime.fed_sync.fleet.population import Fleet
    from fednl_runtime.fed_sync.fleet.repository import Repository
    from fednl_runtime.fed_sync.signing import key_file

    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    repository = Repository(database or f"sqlite:///{state_dir / 'fleet.db'}")
    return Fleet(population, repository, DiskBlobs(state_dir / "blobs"), key_file(state_dir / SIGNING_KEY))


@aggregator.command("serve")
@click.option("--rules", type=FILE, help="First rules, from `rules train` [default: those of the model].")
@click.option("--model", type=FILE, help="Model whose rules come first [default: the shipped model].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="0 takes a free port.")
@click.option("--public-url", help="The address that devices use, where a proxy stands between.")
@with_options(*WHERE, *ROUNDS)
def serve_fleet(
    rules: Path | None,
    model: Path | None,
    host: str,
    port: int,
    public_url: str | None,
    state_dir: Path,
    database: str | None,
    population: str,
    **settings: Any,
) -> None:
    """Serve the aggregation endpoint: enrolment, updates, rounds and rules of one population.

    With the environment variable FEDNL_ADMIN_TOKEN its holder may pause, publish and roll back over HTTP, and
    read /metrics. TLS is for a proxy in front; name its address with --public-url.
    """
    from fednl_runtime.fed_sync.fleet.endpoint import create_app
    from fednl_runtime.fed_sync.fleet.population import found
    from fednl_runtime.fed_sync.signing import public_text
    from fednl_runtime.server_api.commands.serve import listen

    fleet = fleet_at(state_dir, database, population)
    found(fleet, first_rules(fleet, rules, model), policy_of(settings))
    app = create_app(fleet, os.environ.get(ADMIN_VARIABLE, "").strip() or None, public_url)
    with listen(host, port) as sock:
        address, used = sock.getsockname()[:2]
        click.echo(f"Serving the fleet {population} on http://{address}:{used}", err=True)
        click.echo(f"Devices pin the manifest key {public_text(fleet.key.public_key())}", err=True)
        run(app, sock)


def first_rules(fleet: Fleet, rules: Path | None, model: Path | None) -> RuleSet | None:
    """The rules that were named, those of a model for a population that is new, None otherwise."""
    from fednl_runtime.rules import load_rules

    if rules is not None:
        return load_rules(rules)[0]
    with fleet.repository.read() as records:
        known = records.has_population(fleet.population)
    return None if known and model is None else model_rules(model)


def model_rules(model: Path | None) -> RuleSet:
    """The rules that a model file holds, by default the shipped one. Raises RulesError."""
    from fednl_runtime.gradient_backend import load_gradients
    from fednl_runtime.model_file import default_model_path

    return load_gradients(model or default_model_path()).defaults


def policy_of(settings: Mapping[str, Any]) -> Policy:
    """The policy that the options of `serve` say. Raises PolicyError."""
    from fednl_runtime.fed_sync.aggregate import Rule
    from fednl_runtime.fed_sync.fleet.policy import Policy
    from fednl_runtime.fed_sync.optimize import ServerOptimizer
    from fednl_runtime.fed_sync.privacy import CentralPrivacy

    noise = settings["noise_multiplier"]
    return Policy(
        goal=settings["goal"],
        minimum=settings["minimum"],
        deadline_s=settings["deadline"],
        staleness=settings["staleness"],
        clip_norm=settings["clip"],
        sigma=settings["local_noise"],
        rule=Rule(settings["rule"], settings["faulty"]),
        optimizer=ServerOptimizer(settings["optimizer"], settings["lr"]),
        max_step_norm=settings["max_step"],
        privacy=CentralPrivacy(noise, settings["max_epsilon"]) if noise else None,
        sync_s=settings["sync_every"],
    )


def run(app: Any, sock: Any) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are answered first, and SIGTERM exits with 0."""
    import uvicorn

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=10, server_header=False)
    uvicorn.Server(config).run(sockets=[sock])


@aggregator.command()
@click.option("--days", type=POSITIVE, default=7.0, show_default=True, help="How long the token holds.")
@with_options(*WHERE)
def token(days: float, **where: Any) -> None:
    """Print what one device needs to enrol, as one JSON object: a token that works once, and the key to pin."""
    from fednl_runtime.fed_sync.fleet.intake import new_token
    from fednl_runtime.fed_sync.signing import public_text

    fleet = founded(**where)
    secret = new_token(fleet, days * 86_400)
    pinned = public_text(fleet.key.public_key())
    click.echo(json.dumps({"population": fleet.population, "token": secret, "manifest_key": pinned}))


def founded(**where: Any) -> Fleet:
    """The fleet of a state folder. Raises ClickException, Refusal if `serve` did not found it yet."""
    if not (where["state_dir"] / SIGNING_KEY).exists():
        raise click.ClickException(f"{where['state_dir']} holds no fleet; found one there with `aggregator serve`.")
    fleet = fleet_at(**where)
    with fleet.repository.read() as records:
        records.population(fleet.population)
    return fleet


@aggregator.command()
@with_options(*WHERE)
def rounds(**where: Any) -> None:
    """Print the open round, the newest versions and all counters as one JSON object."""
    from fednl_runtime.fed_sync.fleet import view

    fleet = founded(**where)
    click.echo(json.dumps({**view.status(fleet), **view.rounds(fleet)}, indent=2))


@aggregator.command()
@with_options(*WHERE)
def devices(**where: Any) -> None:
    """Print one JSON object for each enrolled device."""
    fleet = founded(**where)
    with fleet.repository.read() as records:
        found = records.devices(fleet.population)
    for device in found:
        seen = {"enrolled": int(device.enrolled), "seen": int(device.seen)}
        click.echo(json.dumps({"device": device.id, "status": device.status, "key_id": device.key_id, **seen}))


@aggregator.command()
@with_options(*WHERE)
def publish(**where: Any) -> None:
    """Close the open round now, with the updates that are there."""
    from fednl_runtime.fed_sync.fleet.rounds import publish_now

    version = publish_now(founded(**where))
    click.echo(f"Version {version.version}: {version.state}, of {version.members} updates.")


@aggregator.command()
@click.option("--to", type=click.IntRange(1), required=True, help="The version whose rules come back.")
@with_options(*WHERE)
def rollback(to: int, **where: Any) -> None:
    """Publish the rules of an earlier version again and withdraw what came after it."""
    from fednl_runtime.fed_sync.fleet import rounds as fleet_rounds

    version = fleet_rounds.rollback(founded(**where), to)
    click.echo(f"Version {version.version} holds the rules of version {to}.")


@aggregator.command()
@click.option("--version", "number", type=click.IntRange(1), required=True, help="A version in quarantine.")
@with_options(*WHERE)
def release(number: int, **where: Any) -> None:
    """Publish rules that were put into quarantine after all."""
    from fednl_runtime.fed_sync.fleet import rounds as fleet_rounds

    version = fleet_rounds.release(founded(**where), number)
    click.echo(f"Version {version.version} holds the rules of version {number}.")


@aggregator.command()
@with_options(*WHERE)
def pause(**where: Any) -> None:
    """Take no updates and close no rounds; devices keep their rules."""
    from fednl_runtime.fed_sync.fleet import rounds as fleet_rounds

    fleet_rounds.pause(founded(**where))
    click.echo("Paused. Go on with `fednl-runtime aggregator resume`.")


@aggregator.command()
@with_options(*WHERE)
def resume(**where: Any) -> None:
    """Go on after a pause."""
    from fednl_runtime.fed_sync.fleet import rounds as fleet_rounds

    fleet_rounds.resume(founded(**where))
    click.echo("Updates are taken again.")


@aggregator.command()
@click.argument("device")
@with_options(*WHERE)
def revoke(device: str, **where: Any) -> None:
    """Take DEVICE out of the fleet, with what it sent and still waits."""
    from fednl_runtime.fed_sync.fleet import intake

    intake.revoke(founded(**where), device)
    click.echo(f"{device} is refused from now on.")
