"""The command that measures how fast a model is here, and how near that comes to what the memory allows."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from fednl_runtime.server_api.commands.local import THREADS
from fednl_runtime.server_api.commands.model import chosen, model_options

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, heads and rows."""


@click.command()
@model_options
@THREADS
@click.option("--markdown", is_flag=True, help="Print tables in Markdown.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Repeats of every measurement.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Calls of the model a repeat.")
@click.option("--soak", type=click.IntRange(1), metavar="N", help="Also read N tokens into one session.")
def bench(
    file: Path | None,
    option: Path | None,
    as_json: bool,
    threads: int | None,
    markdown: bool,
    rounds: int,
    steps: int,
    soak: int | None,
) -> None:
    """Measure the speed of a model on this machine, and how near it comes to what the memory allows.

    Everything is measured several times, each thing once a round; the figures are medians. Where other
    programs run too, compare CPU times: they hardly change.
    """
    if as_json and markdown:
        raise click.UsageError("Give --json or --markdown, not both.")
    report = measured(chosen(file, option), threads, rounds, steps, soak)
    if as_json:
        click.echo(json.dumps(report))
        return
    for table in tables(report):
        click.echo(in_markdown(*table)) if markdown else print_columns(*table)


def measured(path: Path, threads: int | None, rounds: int, steps: int, soak_tokens: int | None) -> dict[str, Any]:
    """Every figure of `bench`, as JSON. Raises ModelFileError."""
    from fednl_runtime import speed, speed_sessions
    from fednl_runtime.onnx_backend import default_threads, load
    from fednl_runtime.tokenizer import Tokenizer

    threads = threads or default_threads()
    backend = load(path, threads)
    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    size = path.stat().st_size
    report: dict[str, Any] = {
        "model": path.name,
        "file_bytes": size,
        "parameters": backend.model.parameters,
        "weight_bytes": speed.weight_bytes(backend.model, size),
        "state_bytes": backend.model.state_bytes,
        "threads": threads,
        "rounds": rounds,
        "machine": f"{platform.machine()} {platform.system()}, onnxruntime {version('onnxruntime')}",
        **plain(speed.reading(backend, size, threads, steps, rounds)),
        "adaptation_seconds": speed.adaptation(backend, steps, rounds),
        "turns": speed_sessions.turns(backend, tokenizer, steps, rounds),
        "nodes": speed.nodes(path, threads, steps),
    }
    with tempfile.TemporaryDirectory() as folder:
        report["keeping"] = speed_sessions.keeping(backend, tokenizer, Path(folder), rounds)
    if soak_tokens:
        report["soak"] = soaked(backend, soak_tokens)
    return plain(report) | {"roofline": shares(plain(report))}


def soaked(backend: Any, tokens: int) -> Any:
    """A long session, with a bar on a terminal."""
    from fednl_runtime.server_api.commands.learn import progress_bar
    from fednl_runtime.speed import soak

    with progress_bar() as bar:
        task = bar.add_task("Long session", total=tokens)
        return soak(backend, tokens, lambda done: bar.advance(task, done))


def plain(value: Any) -> Any:
    """Dataclasses in a report as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


def shares(report: dict[str, Any]) -> dict[str, float]:
    """What share of the measured bandwidth each rate of decode uses: weights and memories, moved once a call."""
    bandwidth = max(report["bandwidth_one"], report["bandwidth_all"])
    rates = report["rates"].items()
    return {name: rate["bytes_per_second"] / bandwidth for name, rate in rates if rate["bytes_per_second"]}


def tables(report: dict[str, Any]) -> Iterator[Table]:
    """The report for people."""
    yield "Model and machine", ("", ""), facts(report)
    yield (
        "Reading tokens",
        ("", "tokens/s", "ms a call", "spread", "CPU ms", "of the bandwidth"),
        [rate_row(name, rate, report["roofline"]) for name, rate in report["rates"].items()],
    )
    yield "One graph, learning and not", *timings(report["adaptation_seconds"])
    yield (
        "Turns through the engine, with sampling",
        ("turns at once", "tokens/s", "CPU ms a token"),
        [(str(t["turns"]), f"{t['tokens_per_second']:,.0f}", ms(t["token"]["cpu"])) for t in report["turns"]],
    )
    yield "Keeping a session", *timings({n: t for n, t in report["keeping"].items() if n != "state_bytes"})
    yield (
        "Operators of a token (with the profiler on)",
        ("", "nodes", "us a token", "us a node"),
        node_rows(report["nodes"]),
    )
    if "soak" in report:
        yield "A long session", ("", ""), soak_rows(report["soak"])


def facts(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """What was measured, and on what."""
    one, all_threads = (report[f"bandwidth_{name}"] / 1e9 for name in ("one", "all"))
    return [
        ("model", f"{report['model']}, {report['parameters']:,} parameters"),
        ("weights read by a call", f"{report['weight_bytes'] / 1e6:.1f} MB"),
        ("memory of a session", f"{report['state_bytes'] / 1e6:.2f} MB"),
        ("bandwidth", f"{one:.1f} GB/s read by one thread, {all_threads:.1f} by all"),
        ("machine", f"{report['machine']}, {report['threads']} threads, {report['rounds']} rounds"),
    ]


def rate_row(name: str, rate: dict[str, Any], roofline: dict[str, float]) -> tuple[str, ...]:
    """One rate of reading."""
    call = rate["call"]
    spread = f"{ms(call['low'])} to {ms(call['high'])}"
    share = f"{100 * roofline[name]:.0f} %" if name in roofline else ""
    return name, f"{rate['tokens_per_second']:,.0f}", ms(call["median"]), spread, ms(call["cpu"]), share


def timings(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of timings by name."""
    rows: list[tuple[str, ...]] = [
        (n.replace("_", " "), ms(t["median"]), f"{ms(t['low'])} to {ms(t['high'])}", ms(t["cpu"]))
        for n, t in found.items()
    ]
    return ("", "ms", "spread", "CPU ms"), rows


def node_rows(nodes: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Each operator, and all together."""
    count, total = (sum(node[name] for node in nodes) for name in ("nodes", "microseconds"))
    return [
        (n["operator"], f"{n['nodes']:.1f}", f"{n['microseconds']:.0f}", f"{n['microseconds'] / n['nodes']:.1f}")
        for n in [*nodes, {"operator": "all", "nodes": count, "microseconds": total}]
    ]


def soak_rows(soak: dict[str, Any]) -> list[tuple[str, ...]]:
    """What a long session took."""
    first, last = soak["first_tenth"], soak["last_tenth"]
    clock, cpu = (100 * (last[name] / first[name] - 1) for name in ("median", "cpu"))
    memory = "not known here" if soak["drift_percent"] is None else f"{soak['drift_percent']:+.2f} %"
    return [
        ("tokens", f"{soak['tokens']:,} in {soak['seconds']:.0f} s"),
        ("time of a token, last tenth against that after the warm-up", f"{clock:+.1f} %"),
        ("CPU time of a token, likewise", f"{cpu:+.1f} %"),
        ("anonymous memory, last tenth against that after the warm-up", memory),
    ]


def ms(seconds: float) -> str:
    """Milliseconds in three digits."""
    return f"{1000 * seconds:.3g}"


def in_markdown(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [heads, ("---",) * len(heads), *rows]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def print_columns(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table on a terminal."""
    from rich.console import Console
    from rich.table import Table as Grid

    table = Grid(*heads, title=title, title_justify="left", show_header=any(heads), box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
