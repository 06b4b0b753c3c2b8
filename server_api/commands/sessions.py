"""Commands about the sessions of a running server, over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.commands.local import FILE, Command
from fednl_runtime.server_api.commands.model import print_json, print_table

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "FEDNL_API_KEY"
PAGE = 1000
TIMEOUT_S = 60
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class ServerError(FednlError):
    """The server does not answer, or refuses what it is asked."""


def server_option(command: Command) -> Command:
    """Which server a command asks."""
    return click.option(
        "--server", default="http://127.0.0.1:8080", show_default=True, metavar="URL", help="The server to ask."
    )(command)


def answer_options(command: Command) -> Command:
    """The options of commands that tell of a session."""
    return server_option(click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command))


def version_options(command: Command) -> Command:
    """The options that name a version."""
    command = click.option("--snapshot", help="The version with this name.")(command)
    return click.option("--version", type=click.IntRange(0), help="The version with this number.")(command)


@click.group()
def sessions() -> None:
    """Look after the sessions of a running server; the key comes from FEDNL_API_KEY."""


@sessions.command()
@answer_options
def ls(server: str, as_json: bool) -> None:
    """List the sessions by name."""
    with connected(server) as client:
        found = list(pages(client))
    if as_json:
        print_json({"sessions": found})
        return
    rows = {session["id"]: line(session) for session in found}
    print_table(f"{len(found)} sessions" if len(found) != 1 else "1 session", rows)


@sessions.command()
@click.argument("session_id", metavar="ID")
@answer_options
def show(session_id: str, server: str, as_json: bool) -> None:
    """Tell what is known of a session: its versions, and what was set."""
    with connected(server) as client:
        session = ask(client, "GET", path_of(session_id))
    if as_json:
        print_json(session)
        return
    versions = session.pop("versions")
    print_table(session["id"], session)
    print_table("Versions to go back to", {str(v["version"]): version_line(v) for v in versions})


@sessions.command()
@click.argument("session_id", metavar="ID")
@click.argument("new_id", metavar="NEW_ID")
@version_options
@answer_options
def fork(session_id: str, new_id: str, server: str, as_json: bool, **version: Any) -> None:
    """Make a session NEW_ID that goes on from session ID, which stays as it is."""
    body = {"id": new_id} | given(version)
    with connected(server) as client:
        tell(ask(client, "POST", path_of(session_id, "fork"), json=body), as_json)


@sessions.command()
@click.argument("session_id", metavar="ID")
@version_options
@click.option("--turns", type=click.IntRange(1), help="Undo so many turns [default: 1].")
@answer_options
def rollback(session_id: str, server: str, as_json: bool, **version: Any) -> None:
    """Go back to an older version of session ID."""
    with connected(server) as client:
        tell(ask(client, "POST", path_of(session_id, "rollback"), json=given(version)), as_json)


@sessions.command(name="export")
@click.argument("session_id", metavar="ID")
@click.option("-o", "--output", type=FILE, help="File to write [default: ID.safetensors].")
@server_option
def export_(session_id: str, output: Path | None, server: str) -> None:
    """Write session ID to a file, which can be imported where the same model is served."""
    with connected(server) as client:
        data = checked(client.get(path_of(session_id, "export"))).content
    path = output or Path(f"{session_id}.safetensors")
    path.write_bytes(data)
    click.echo(f"Wrote {path} ({len(data)} bytes).")


@sessions.command(name="import")
@click.argument("file", type=FILE)
@click.option("--id", "session_id", help="Name of the session [default: one that nobody has].")
@answer_options
def import_(file: Path, session_id: str | None, server: str, as_json: bool) -> None:
    """Make a session out of an exported FILE."""
    query = {} if session_id is None else {"id": session_id}
    headers = {"content-type": "application/octet-stream"}
    data = file.read_bytes()
    with connected(server) as client:
        tell(ask(client, "POST", "/v1/sessions/import", params=query, content=data, headers=headers), as_json)


@sessions.command()
@click.argument("session_ids", metavar="ID...", nargs=-1, required=True)
@server_option
def rm(session_ids: tuple[str, ...], server: str) -> None:
    """Forget sessions and all that was kept of them."""
    with connected(server) as client:
        for session_id in session_ids:
            ask(client, "DELETE", path_of(session_id))
            click.echo(f"Deleted {session_id}.")


@contextlib.contextmanager
def connected(server: str) -> Iterator[httpx.Client]:
    """A client of `server`. Raises ServerError when that does not answer."""
    import httpx

    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = [(b"authorization", b"Bearer " + os.fsencode(key))] if key else []
    try:
        with httpx.Client(base_url=server, headers=headers, timeout=TIMEOUT_S) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in why:
            raise ServerError(
                f"The certificate of {server} is not trusted ({why}). Name it in SSL_CERT_FILE, if it is yours."
            ) from error
        raise ServerError(
            f"{server} does not answer ({why}). Start `fednl-runtime serve`, or name --server."
        ) from error


def ask(client: httpx.Client, method: str, path: str, **options: Any) -> dict[str, Any]:
    """The JSON object that the server answers. Raises ServerError."""
    response = checked(client.request(method, path, **options))
    try:
        return dict(response.json())
    except ValueError as error:
        raise ServerError(f"{client.base_url} is no FedNL server: it does not answer in JSON.") from error


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is no refusal. Raises ServerError with the server's own sentence."""
    if response.is_success:
        return response
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered {response.status_code}; is it a FedNL server?"
    if response.status_code == 401:
        message = f"{message} Set {KEY_VARIABLE} to the server's key."
    raise ServerError(message)


def pages(client: httpx.Client) -> Iterator[dict[str, Any]]:
    """All sessions, page by page."""
    page: dict[str, Any] = {"has_more": True, "last": ""}
    while page["has_more"]:
        page = ask(client, "GET", "/v1/sessions", params={"limit": PAGE, "after": page["last"]})
        yield from page["data"]


def path_of(session_id: str, *more: str) -> str:
    """The path of a session, or of what is below it."""
    return "/".join(("/v1/sessions", quote(session_id, safe=""), *more))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def tell(session: dict[str, Any], as_json: bool) -> None:
    """One line, or one JSON object, about a session as it is now."""
    click.echo(json.dumps(session) if as_json else f"{session['id']}: {line(session)}")


def line(session: Mapping[str, Any]) -> str:
    """A session in a line."""
    marks = ["frozen"] * session["frozen"] + ["not synced"] * (not session["sync"])
    marks += [] if session["persisted"] else ["in memory only"]
    facts = [f"version {session['version']}", f"{session['tokens_seen']} tokens", f"used {ago(session['used'])}"]
    return ", ".join(facts + marks)


def version_line(version: Mapping[str, Any]) -> str:
    """A version in a line."""
    name = f", {version['name']}" if version["name"] else ""
    return f"{version['tokens_seen']} tokens, {ago(version['created'])}{name}"


def ago(when: float) -> str:
    """How long ago a time in seconds since the epoch was."""
    seconds = max(0.0, time.time() - when)
    size, unit = next((pair for pair in AGES if seconds >= pair[0]), AGES[-1])
    return f"{int(seconds / size)} {unit} ago"
