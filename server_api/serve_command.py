"""The command that serves a model over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.server_api.local import FILE, RULES, THREADS, engine_on, kept_sessions, loaded, session_options
from fednl_runtime.server_api.model_commands import chosen

if TYPE_CHECKING:
    from fednl_runtime.server_api.edge import Edge

KEY_VARIABLE = "FEDNL_API_KEY"
DRAIN_S = 30
"""Seconds that open streams have left when the server is told to stop."""


@click.command()
@click.argument("file", type=FILE, required=False, metavar="[MODEL]")
@click.option("--model", "option", type=FILE, help="Model file [default: the shipped model].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free port.")
@click.option("--slots", type=click.IntRange(1), default=4, show_default=True, help="Turns that run side by side.")
@click.option("--queue", type=click.IntRange(1), default=32, show_default=True, help="Turns that may wait.")
@click.option("--max-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Largest max_tokens.")
@session_options
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
    rules: Path | None,
    threads: int | None,
    **sessions: Any,
) -> None:
    """Serve MODEL, by default the shipped one, over OpenAI's completion API.

    With the environment variable FEDNL_API_KEY every request but /health needs that key; without it
    the server listens on loopback addresses only.
    """
    from fednl_runtime.engine import EngineLimits
    from fednl_runtime.server_api.app import create_app
    from fednl_runtime.server_api.banner import banner
    from fednl_runtime.server_api.edge import EdgeOptions, is_loopback
    from fednl_runtime.server_api.security import key_ring
    from fednl_runtime.server_api.served import Served

    api_key = os.environ.get(KEY_VARIABLE, "").strip() or None  # no header can carry the line end of a key file
    if api_key is None and not is_loopback(host):
        raise click.UsageError(f"{host} can be reached from other machines: set {KEY_VARIABLE} to a secret key first.")
    path = chosen(file, option)
    backend = loaded(path, threads, rules)
    folder, store = kept_sessions(backend.fingerprint, **sessions)
    limits = EngineLimits(slots=slots, queue=queue, max_tokens=max_tokens, store=store)
    with listen(host, port) as sock, engine_on(backend, limits, folder) as engine:
        click.echo(banner(backend.model, engine, sock.getsockname(), api_key is not None, folder), err=True)
        run(create_app(Served.of(engine, backend.model, path), EdgeOptions(key_ring(api_key, None))), sock)


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


def run(app: Edge, sock: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then let open streams end; SIGTERM exits with 0."""
    import uvicorn

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=DRAIN_S, server_header=False)
    uvicorn.Server(config).run(sockets=[sock])
