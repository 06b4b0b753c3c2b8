"""The command that makes API keys."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fednl_runtime.server_api.commands.local import FILE
from fednl_runtime.server_api.entrance.scopes import SCOPES


@click.group()
def keys() -> None:
    """Make API keys for `serve --keys`."""


@keys.command()
@click.option("--name", required=True, help="Name of the key; it owns the sessions made with it.")
@click.option("--scopes", default="infer,sessions", show_default=True, help=f"Some of {', '.join(SCOPES)}.")
@click.option("--file", type=FILE, help="File of keys to add the line to, instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def new(name: str, scopes: str, file: Path | None, as_json: bool) -> None:
    """Print a fresh key, which is shown only now, and the line of a key file that lets it in."""
    from fednl_runtime.server_api.entrance.security import add_key, new_key

    secret, key = new_key(name, [scope.strip() for scope in scopes.split(",")])
    if file is not None:
        add_key(file, key)
    if as_json:
        click.echo(json.dumps({"key": secret, "line": key.line()}))
        return
    click.echo("Give this key to the client; it is not shown again:", err=True)
    click.echo(secret)
    if file is None:
        click.echo("Put this line into the file of serve --keys:", err=True)
        click.echo(key.line())
