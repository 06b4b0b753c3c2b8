"""The command that serves a model over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from pathlib import Path
from typing import Any, Literal

import click

from fednl_runtime.server_api.commands.local import (
    FILE,
    RULES,
    THREADS,
    Command,
    kept_sessions,
    loaded,
    session_options,
    size,
)
from fednl_runtime.server_api.commands.model import chosen
from fednl_runtime.server_api.commands.sync import sync_options, taken

KEY_VARIABLE = "FEDNL_API_KEY"
MAX_HEAD_BYTES = 1 << 20
"""Room in a state file for what is not memory."""
ORIGIN = re.compile(r"https?://[^/*]+")


def access_options(command: Command) -> Command:
    """The options that say who may come in, and how."""
    options = [
        click.option("--keys", type=FILE, help="File of API keys, one a line as `keys new` prints it."),
        click.option("--allow-host", multiple=True, help="Host name to answer to besides localhost; may be repeated."),
        click.option("--cors-origin", multiple=True, help="Origin whose pages may call the server; may be repeated."),
        click.option("--max-body", type=size, default="4M", show_default=True, help="Largest body of a request."),
        click.option("--rate", type=click.IntRange(1), help="Requests a minute and key [default: any number]."),
        click.option("--tls-cert", type=FILE, help="Certificate chain in PEM, to serve HTTPS."),
        click.option("--tls-key", type=FILE, help="The certificate's private key in PEM."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=FILE, required=False, metavar="[MODEL]")
@click.option("--model", "option", type=FILE, help="Model file [default: the shipped model].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free port.")
@click.option("--slots", type=click.IntRange(1), default=8, show_default=True, help="Turns that run side by side.")
@click.option("--queue", type=click.IntRange(1), default=32, show_default=True, help="Turns that may wait.")
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest max_tokens.")
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    help="Seconds that running requests have left when the server is told to stop.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of log lines."
)
@access_options
@session_options
@sync_options
@RULES
@THREADS
def serve(
    file: Path | None,
    option: Path | None,
    host: str,
    port: int,
    slots: int,
    queue: int,
    max_tokens: int,
    drain_timeout: float,
    log_format: Literal["text", "json"],
    keys: Path | None,
    allow_host: tuple[str, ...],
    cors_origin: tuple[str, ...],
    max_body: int,
    rate: int | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    rules: Path | None,
    threads: int | None,
    **sessions: Any,
) -> None:
    """Serve MODEL, by default the shipped one, over OpenAI's completion API.

    With the environment variable FEDNL_API_KEY, or with --keys, every request but /health needs a key;
    without keys the server listens on loopback addresses only. SIGTERM and Ctrl-C let running requests
    end first; a second one does not wait for them.
    """
    from fednl_runtime.engine import EngineLimits
    from fednl_runtime.server_api.app import create_app
    from fednl_runtime.server_api.commands.banner import Listening, banner
    from fednl_runtime.server_api.commands.syncing import synced_engine
    from fednl_runtime.server_api.entrance.drain import run
    from fednl_runtime.server_api.entrance.edge import EdgeOptions, is_loopback
    from fednl_runtime.server_api.entrance.security import key_ring
    from fednl_runtime.server_api.observing.logs import configure, log_start
    from fednl_runtime.server_api.served import Served

    api_key = os.environ.get(KEY_VARIABLE, "").strip() or None  # no header can carry the line end of a key file
    ring = key_ring(api_key, keys)
    if not len(ring) and not is_loopback(host):
        raise click.UsageError(
            f"{host} can be reached from other machines: set {KEY_VARIABLE} to a secret key, or --keys, first."
        )
    tls = tls_files(tls_cert, tls_key)
    path = chosen(file, option)
    backend = loaded(path, threads, rules)
    sync = taken(sessions)
    folder, store = kept_sessions(backend.fingerprint, **sessions)
    limits = EngineLimits(slots=slots, queue=queue, max_tokens=max_tokens, store=store)
    with (
        listen(host, port) as sock,
        synced_engine(backend, path, limits, folder, sync, rules is None) as (engine, agent),
    ):
        listening = Listening(sock.getsockname(), tls is not None, len(ring), api_key is not None, folder)
        configure(log_format)
        if log_format == "json":
            log_start(listening.facts(backend.model))
        else:
            click.echo(banner(backend.model, engine, listening), err=True)
        options = EdgeOptions(
            ring,
            tuple(name.lower() for name in allow_host),
            origins(cors_origin),
            max_body,
            max(max_body, 2 * engine.state_bytes + MAX_HEAD_BYTES),
            rate,
        )
        run(create_app(Served.of(engine, backend.model, path, agent), options), sock, drain_timeout, tls)


def origins(given: tuple[str, ...]) -> tuple[str, ...]:
    """Origins as browsers send them. Raises click.UsageError for what is none."""
    for origin in given:
        if not ORIGIN.fullmatch(origin):
            raise click.UsageError(f"{origin!r} is no origin; write https://app.example, without a path.")
    return given


def tls_files(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """The files for TLS, None for plain HTTP. Raises click.UsageError, click.ClickException."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise click.UsageError("TLS needs both --tls-cert and --tls-key.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or "they are damaged, or do not belong together"
        raise click.ClickException(f"{certificate} and {key} cannot be used for TLS: {reason}.") from error
    return certificate, key


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises click.ClickException if the address cannot be had.

    The protocol is named because asyncio turns Nagle's algorithm off only where it is: with it on, each
    answer that takes two packets waits 40 ms for the client's delayed acknowledgement.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_failure:
            sock = on_failure.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(128)
            on_failure.pop_all()
    except OSError as error:
        raise click.ClickException(
            f"Cannot listen on {host} port {port}: {error.strerror}. Try another --port."
        ) from error
    except UnicodeError as error:  # an empty or overlong label cannot be looked up
        raise click.ClickException(f"Cannot listen on {host}: this is no host name. Try another --host.") from error
    return sock
