"""The command that looks at a machine before a server is started on it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fednl_runtime.server_api.commands.local import FILE
from fednl_runtime.server_api.commands.model import chosen, model_options, print_table

if TYPE_CHECKING:
    from fednl_runtime.server_api.commands.checkup import Finding


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Folder to keep sessions in [default: as serve].")
@click.option("--keys", type=FILE, help="File of API keys.")
@click.option("--tls-cert", type=FILE, help="Certificate chain in PEM.")
@click.option("--tls-key", type=FILE, help="The certificate's private key in PEM.")
def doctor(
    file: Path | None,
    option: Path | None,
    as_json: bool,
    host: str,
    port: int,
    state_dir: Path | None,
    keys: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    """Look at what `serve` will need here; exit code 1 if something must be mended first.

    Give it the options that serve will get.
    """
    from fednl_runtime.server_api.commands import checkup
    from fednl_runtime.server_api.commands.state_dir import default_state_dir

    findings = [
        checkup.threads(),
        checkup.bandwidth(),
        checkup.model(chosen(file, option)),
        checkup.state_dir(state_dir or default_state_dir()),
        *([checkup.key_file(keys)] if keys else []),
        *look_at_tls(tls_cert, tls_key),
        look_at_port(host, port),
    ]
    show(findings, as_json)
    if not all(finding.ok for finding in findings):
        click.get_current_context().exit(1)


def look_at_tls(certificate: Path | None, key: Path | None) -> Iterator[Finding]:
    """Whether the files for TLS can be used, if there are any."""
    from fednl_runtime.server_api.commands import checkup
    from fednl_runtime.server_api.commands.serve import tls_files

    if certificate or key:
        yield checkup.attempt(
            "TLS files", lambda: "usable" if tls_files(certificate, key) else "", click.ClickException
        )
    if certificate:
        yield checkup.certificate(certificate, datetime.datetime.now(datetime.UTC))


def look_at_port(host: str, port: int) -> Finding:
    """Whether the address is free."""
    from fednl_runtime.server_api.commands.checkup import attempt
    from fednl_runtime.server_api.commands.serve import listen

    def look() -> str:
        listen(host, port).close()
        return f"{host} port {port} is free"

    return attempt("address", look, click.ClickException)


def show(findings: list[Finding], as_json: bool) -> None:
    """Print the findings."""
    if as_json:
        rows = [{"name": f.name, "ok": f.ok, "says": f.says} for f in findings]
        click.echo(json.dumps({"ok": all(f.ok for f in findings), "findings": rows}))
    else:
        print_table("Doctor", {f.name: f"{'ok  ' if f.ok else 'MEND'}  {f.says}" for f in findings})
