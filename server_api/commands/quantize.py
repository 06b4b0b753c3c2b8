"""The command that makes a model file smaller, and refuses where that costs too much."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fednl_runtime.server_api.commands.local import FILE
from fednl_runtime.server_api.commands.model import chosen, model_options, print_json, print_table

if TYPE_CHECKING:
    from fednl_runtime.onnx_backend import OnnxBackend
    from fednl_runtime.state import Tokens

OWN_TOKENS = 4096
LIMITS = {8: 0.5, 4: 2.0}
"""Largest rise of the streaming cross-entropy in percent, by bits."""


@click.command()
@model_options
@click.option("-o", "--output", type=FILE, required=True, help="File to write.")
@click.option("--bits", type=click.Choice([8, 4]), default=8, show_default=True, help="Bits of a weight.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text to measure on.")
@click.option("--max-rise", type=float, help="Percent that cross-entropy may rise [default: 0.5 for 8 bits, 2 for 4].")
@click.option("--force", is_flag=True, help="Keep the file even if it costs more than that.")
def quantize(
    file: Path | None,
    option: Path | None,
    as_json: bool,
    output: Path,
    bits: int,
    text: Path | None,
    max_rise: float | None,
    force: bool,
) -> None:
    """Write a model file with its matrices in 8 or 4 bits; memories and rules stay as exact as they were.

    What that costs is measured on your TEXT, else on a text that the model writes itself: log-probabilities
    and streaming cross-entropy with learning on and off. A file that costs too much is not kept (exit code 4).
    """
    from fednl_runtime.errors import VerificationError
    from fednl_runtime.export.gate import cost
    from fednl_runtime.export.quantize import quantize_file
    from fednl_runtime.model_file import file_bytes
    from fednl_runtime.onnx_backend import load

    source, limit = chosen(file, option), LIMITS[bits] if max_rise is None else max_rise
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".quantize-") as folder:
        unproven = Path(folder, output.name)
        quantize_file(source, unproven, bits)
        before, after = load(source), load(unproven)
        found = cost(before, after, measured_text(before, text))
        good = found.rise_percent <= limit
        for part in Path(folder).iterdir() if good or force else ():
            part.replace(output.with_name(part.name))
    sizes = {"bytes_before": file_bytes(source), "bytes": file_bytes(output) if good or force else None}
    report = {**sizes, **dataclasses.asdict(found), "rise_percent": found.rise_percent, "max_rise_percent": limit}
    print_json({"ok": good, **report}) if as_json else print_table(f"{bits} bits", report)
    if not good and not force:
        raise VerificationError(
            f"Cross-entropy rises by {found.rise_percent:.2f} %, more than {limit:g} %; nothing was written. "
            "Take more bits, allow more with --max-rise, or keep it with --force."
        )
    if not good:
        click.echo(f"Warning: cross-entropy rises by {found.rise_percent:.2f} %, more than {limit:g} %.", err=True)


def measured_text(backend: OnnxBackend, path: Path | None) -> Tokens:
    """The tokens of a text file, or some that the model writes. Raises RequestError if the file is too short."""
    from fednl_runtime.corpus import encode_documents, read_text
    from fednl_runtime.errors import RequestError
    from fednl_runtime.export.gate import own_text
    from fednl_runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    if path is None:
        return own_text(backend, tokenizer.end_of_text, OWN_TOKENS)
    tokens = encode_documents(tokenizer, read_text(path))
    if len(tokens) < 2:
        raise RequestError(f"{path} holds no text to measure on. Give one of a few thousand words.")
    return tokens
