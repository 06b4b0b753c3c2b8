"""Commands about model files: info, export, verify."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fednl_runtime.server_api.commands.local import FILE, Command


def model_options(command: Command) -> Command:
    """The model of a command: positional or --model, by default the one that is shipped."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")(command)
    command = click.option("--model", "option", type=FILE, help="Model file [default: the shipped model].")(command)
    return click.argument("file", type=FILE, required=False)(command)


def chosen(file: Path | None, option: Path | None) -> Path:
    """The model file that the user names, or the shipped one; an argument goes before the environment.

    Raises:
        ModelFileError: no model is shipped.
    """
    from fednl_runtime.model_file import default_model_path

    source = click.get_current_context().get_parameter_source("option")
    if file and option and source is not ParameterSource.ENVIRONMENT:
        raise click.UsageError("Name the model once: as an argument or with --model.")
    return file or option or default_model_path()


@click.command()
@model_options
def info(file: Path | None, option: Path | None, as_json: bool) -> None:
    """Describe a model file: sizes, layers, memory of a session, fingerprint."""
    from fednl_runtime.model_file import file_bytes
    from fednl_runtime.onnx_backend import load

    path = chosen(file, option)
    described = load(path).model.summary()
    summary = {"file": path.name, "file_bytes": file_bytes(path), **described}
    print_json(summary) if as_json else print_table(path.name, summary)


@click.command()
@click.argument("checkpoint", type=FILE)
@click.option("-o", "--output", type=FILE, default=Path("model.onnx"), show_default=True, help="File to write.")
@click.option("--portable", is_flag=True, help="Standard ONNX operators only: slower, but runs everywhere.")
@click.option("--name", default="hope", show_default=True, help="Name of the model.")
def export(checkpoint: Path, output: Path, portable: bool, name: str) -> None:
    """Write a training CHECKPOINT as one model file that onnxruntime can serve.

    The gradient graph that `rules train` needs is written next to it, as model.rules.onnx; weights of more than
    2 GB, which the format cannot hold in one file, as model.onnx.data.
    """
    from fednl_runtime.export.checkpoint import load_checkpoint
    from fednl_runtime.export.graph import export_model
    from fednl_runtime.export.ops import Ops
    from fednl_runtime.export.rules_graph import export_rules
    from fednl_runtime.model_file import file_bytes

    config, params, tokenizer_json = load_checkpoint(checkpoint)
    export_model(params, config, tokenizer_json, output, Ops(portable), name)
    gradients = export_rules(params, config, output)
    sizes = " and ".join(f"{path} ({file_bytes(path) / 1e6:.1f} MB)" for path in (output, gradients))
    click.echo(f"Wrote {sizes}. Check it with: fednl-runtime verify {output}")


@click.command()
@model_options
@click.option("--against", type=FILE, help="Also compare with this training checkpoint, in torch.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of onnxruntime.")
def verify(file: Path | None, option: Path | None, as_json: bool, against: Path | None, threads: int) -> None:
    """Check a model file against the NumPy law of the model; exit code 4 when they differ."""
    from fednl_runtime.export.verify import require
    from fednl_runtime.export.verify import verify as run

    report = run(chosen(file, option), against, threads=threads)
    if as_json:
        print_json(report.to_dict())
    else:
        print_table("Largest difference", {name: f"{value:.2e}" for name, value in report.tensors.items()})
        marks = {True: "ok", False: "FAILED"}
        checks = {c.name: f"{marks[c.ok]}  {c.value:.2e} of {c.bound:.0e}" for c in report.checks}
        print_table("Checks", checks)
    require(report)


def print_json(value: Mapping[str, Any]) -> None:
    """One line of JSON on standard output."""
    click.echo(json.dumps(value))


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Two columns on standard output: names and values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    Console(file=sys.stdout).print(table)
