"""The command that completes a text on the terminal, and what commands that answer there have in common."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from fednl_runtime.server_api.commands.local import FILE, THREADS, local_engine, sampling_options

if TYPE_CHECKING:
    from fednl_runtime.engine import Engine
    from fednl_runtime.turn import TurnReport, TurnRequest


@click.command()
@click.argument("prompt")
@click.option("--model", type=FILE, help="Model file [default: the shipped model].")
@sampling_options(max_tokens=64)
@click.option("--stop", multiple=True, help="End the text before this string; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@THREADS
def complete(prompt: str, model: Path | None, threads: int | None, as_json: bool, **sampling: Any) -> None:
    """Continue PROMPT and print what follows; - reads the prompt from standard input."""
    from fednl_runtime.sampling import SamplingParams
    from fednl_runtime.turn import TurnRequest

    params = SamplingParams(**sampling)
    text = stdin().read() if prompt == "-" else prompt
    with local_engine(model, threads) as engine:
        report = write_answer(engine, TurnRequest(tuple(engine.tokenizer.encode(text)), params), as_json)
    if not as_json:
        click.echo()
        click.echo(summary(report), err=True)


def stdin() -> TextIO:
    """Standard input as UTF-8; bytes that are not become U+FFFD, as in files."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return sys.stdin


def lines() -> Iterator[str]:
    """The lines of standard input, each asked for by a prompt on a terminal."""
    source = stdin()
    while True:
        if source.isatty():
            click.echo("> ", nl=False, err=True)
        line = source.readline()
        if not line:
            return
        yield line.rstrip("\n")


def write_answer(engine: Engine, request: TurnRequest, as_json: bool = False) -> TurnReport:
    """Run a turn and print its text as it comes, or as one JSON object at the end."""
    from fednl_runtime.turn import TokenEvent, TurnReport

    pieces: list[str] = []
    for event in engine.turn(request):
        if isinstance(event, TokenEvent):
            pieces.append(event.text)
            if not as_json:
                click.echo(event.text, nl=False)
        elif isinstance(event, TurnReport):
            report = event
    if as_json:
        names = ("finish_reason", "prompt_tokens", "completion_tokens", "surprise")
        click.echo(json.dumps({"text": "".join(pieces), **{name: getattr(report, name) for name in names}}))
    return report


def summary(report: TurnReport) -> str:
    """One line about a turn."""
    surprise = "" if report.surprise is None else f", surprise {report.surprise:.2f} nats a token"
    learnt = f", version {report.version}, {report.tokens_seen} tokens seen" if report.session_id else ""
    return f"{report.prompt_tokens} tokens read, {report.completion_tokens} generated{surprise}{learnt}"
