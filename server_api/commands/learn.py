"""Commands about learning: train a model, and measure whether one learns."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.server_api.commands.local import FILE, RULES, THREADS, loaded

if TYPE_CHECKING:
    from rich.progress import Progress

    from fednl_runtime.evaluate import Arm

FOLDER = click.Path(file_okay=False, path_type=Path)
HELD_OUT = 131_073
"""Tokens of each source's end that training leaves out, at most a tenth: one stream of 128K predictions."""


@contextmanager
def progress_bar(*columns: str) -> Iterator[Progress]:
    """A bar with extra text columns on stderr, shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    extra = [TextColumn(f"{{task.fields[{c}]}}") for c in columns]
    with Progress(*shown, *extra, console=console, disable=not console.is_terminal) as progress:
        yield progress


def a_number(_: click.Context, param: click.Parameter, value: float) -> float:
    """The value of an option, unless it is NaN, which passes every range. Raises click.BadParameter."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of hours.", param=param)
    return value


@click.command()
@click.argument("corpus", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=FOLDER, default=Path("runs/hope"), show_default=True, help="Folder of the run.")
@click.option(
    "--hours", type=click.FloatRange(0, 1e6), callback=a_number, default=2.0, show_default=True,
    help="Time to train; a run in the same folder goes on.",
)  # fmt: skip
@click.option(
    "--vocab-size", type=click.IntRange(257, 65536), default=4096, show_default=True,
    help="Tokens of the tokenizer trained on the corpus.",
)  # fmt: skip
@click.option("--layers", default="delta,delta,self_modifying,delta", show_default=True, help="Profile of each block.")
@click.option("--d-model", default=256, show_default=True, help="Width of the model.")
@click.option("--without", multiple=True, help="Domain to leave out; may be repeated.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=1, show_default=True, help="Seed of weights and data order.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Threads of torch [default: the cores given to us].")
@click.option("--no-compile", is_flag=True, help="Start at once instead of compiling for minutes; trains half as fast.")
def train(
    corpus: Path, output: Path, hours: float, vocab_size: int, layers: str, d_model: int,
    without: tuple[str, ...], seed: int, threads: int | None, no_compile: bool,
) -> None:  # fmt: skip
    """Train a model on CORPUS, a folder of DOMAIN/SOURCE.txt or .txt.xz files.

    Documents are separated by lines that hold <|endoftext|>. The run's folder gets model.safetensors
    for `export`, log.jsonl, and resume.pt to go on from.
    """
    from fednl_runtime.config import HopeConfig
    from fednl_runtime.export.data import find_sources, load_source, tokenizer_of
    from fednl_runtime.export.train import Trainer, TrainSettings, set_up_torch, validate

    set_up_torch(threads)
    paths = find_sources(corpus, without)
    tokenizer = tokenizer_of(output, paths, vocab_size)
    click.echo(f"Reading {len(paths)} sources", err=True)
    sources = [load_source(path, tokenizer, output / "tokens", HELD_OUT) for path in paths]
    config = HopeConfig(vocab_size, d_model=d_model, layers=tuple(layers.split(",")))
    trainer = Trainer(config, tokenizer, sources, TrainSettings(hours, seed=seed, compile=not no_compile), output)
    with progress_bar("loss", "speed") as bar:
        task = bar.add_task("Training", total=hours * 3600, loss="", speed="")

        def report(p: Any) -> None:
            speed = f"{p.tokens_per_second:,.0f} tokens/s"
            bar.update(task, completed=p.seconds, loss=f"{p.loss:.3f} nats a token", speed=speed)

        trainer.run(report)
    nats = validate(trainer.model, sources)
    click.echo(json.dumps(trainer.summary() | {"validation_nats_per_token": nats}))
    click.echo(f"Now: fednl-runtime export {output / 'model.safetensors'}", err=True)


@click.command(name="eval")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", "path", type=FILE, help="Model file [default: the shipped model].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option("--plot", type=FILE, help="Draw the curves to this PNG, SVG or PDF file.")
@RULES
@THREADS
def evaluate(
    files: tuple[Path, ...], path: Path | None, as_json: bool, plot: Path | None, rules: Path | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Measure whether the model learns from your FILES: streaming cross-entropy in 1,024-token bins.

    Each file is read from an empty memory, three times with the same weights: `on` learns
    throughout, `reset` forgets every 512 tokens (the 128 before are read again, unscored), and in
    `frozen` the slow levels stop learning after 512 tokens.
    """
    from fednl_runtime.server_api.commands.plot import draw_curves, require_drawing

    if plot:
        require_drawing(plot)
    results = list(evaluate_files(files, path, threads, rules))
    report = summary(results)
    if plot:
        draw_curves(results, plot)
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_results(report)


def evaluate_files(
    files: tuple[Path, ...], path: Path | None, threads: int | None, rules: Path | None
) -> Iterator[tuple[str, int, dict[str, Arm]]]:
    """Name, tokens and arms of each file."""
    from fednl_runtime import evaluate as ev
    from fednl_runtime.corpus import encode_documents, read_text
    from fednl_runtime.errors import RequestError
    from fednl_runtime.model_file import default_model_path
    from fednl_runtime.tokenizer import Tokenizer

    backend = loaded(path or default_model_path(), threads, rules)
    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    with progress_bar() as bar:
        for file in files:
            tokens = encode_documents(tokenizer, read_text(file))
            num_bytes = len(tokenizer.decode_bytes(tokens[1:].tolist()))
            if not num_bytes:
                raise RequestError(f"{file} holds no text to evaluate. Give one of a few thousand words.")
            task = bar.add_task(file.name, total=ev.work(len(tokens) - 1))
            arms = ev.evaluate(backend, tokens, num_bytes, lambda n, task=task: bar.advance(task, n))  # type: ignore[misc]
            yield file.name, len(tokens), arms


def summary(results: list[tuple[str, int, dict[str, Arm]]]) -> dict[str, Any]:
    """The JSON report of `eval`."""
    from fednl_runtime.evaluate import mean_difference

    files = [
        {"file": name, "tokens": tokens, "arms": {arm: dataclasses.asdict(a) for arm, a in arms.items()}}
        for name, tokens, arms in results
    ]
    arms = [arms for _, _, arms in results]
    return {"files": files} | {f"on_vs_{o}_percent": mean_difference(arms, o) for o in ("reset", "frozen")}


def print_results(report: dict[str, Any]) -> None:
    """The report as a table."""
    from rich.console import Console
    from rich.table import Table

    names = ("on", "reset", "frozen")
    table = Table("file", "tokens", *(f"{name}, nats/token" for name in names), "on vs reset", "on vs frozen")
    for file in report["files"]:
        on, reset, frozen = (file["arms"][name]["nats_per_token"] for name in names)
        changes = [f"{100 * (on / other - 1):+.1f} %" for other in (reset, frozen)]
        table.add_row(file["file"], f"{file['tokens']:,}", *(f"{x:.3f}" for x in (on, reset, frozen)), *changes)
    averages = [f"{report[f'on_vs_{other}_percent']:+.1f} %" for other in ("reset", "frozen")]
    table.add_row("average", "", "", "", "", *averages)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
