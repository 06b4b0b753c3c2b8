"""Does the shipped model learn? Long streams, needles in real text, domain shift and repetition.

Each command reads text files (plain or .xz) with a model file and prints one JSON object last. Seeds are fixed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from recall import average, recall
from repetition import PASSAGE, repetition
from shift import PIECE, shift
from streams import at_lengths, percent, read_arms, read_tokens, summary, table

from fednl_runtime.evaluate import BIN
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import OnnxBackend, load
from fednl_runtime.state import Tokens
from fednl_runtime.tokenizer import Tokenizer

LENGTHS = (8192, 32768, 131072)
DISTANCES = (512, 2048, 8192, 32768)
GAPS = (1024, 2048, 4096, 8192, 16384)
FILES = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
MODEL = click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
SEED = click.option("--seed", default=0, show_default=True)


def open_model(model: Path | None) -> tuple[OnnxBackend, Tokenizer]:
    """A model file on one thread, and its tokenizer."""
    backend = load(model or default_model_path(), threads=1)
    return backend, Tokenizer(backend.tokenizer_json, backend.config.vocab_size)


def texts_of(tokenizer: Tokenizer, files: tuple[Path, ...], length: int) -> list[Tokens]:
    """The first tokens of each file that has as many. Raises click.UsageError if none has."""
    texts = [text[:length] for file in files if len(text := read_tokens(tokenizer, file)) >= length]
    if not texts:
        raise click.UsageError(f"None of the files has {length:,} tokens.")
    return texts


def name_of(file: Path) -> str:
    """A file's name without what tells its kind."""
    return file.name.split(".")[0]


def draw(curves: dict[str, list[float]], output: Path) -> None:
    """How much lower `on` is than `reset` in each bin of 1,024 tokens, for each file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, values in curves.items():
        smooth = [np.mean(values[max(0, i - 7) : i + 1]) for i in range(len(values))]
        axis.plot([i + 1 for i in range(len(values))], smooth, linewidth=1.1, label=name)
    axis.axhline(0, color="#8d99ae", linewidth=0.8)
    axis.set(xscale="log", xlabel="thousand tokens read", ylabel="on against reset, %\n(mean of 8 bins)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=6, ncols=3)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


@click.group()
def main() -> None:
    """Measure what a model learns while it reads."""


@main.command()
@FILES
@MODEL
@click.option("--tail", default=0, help="Read what training held out of each file: its last tokens, at most a tenth.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves to this file.")
def streams(files: tuple[Path, ...], model: Path | None, tail: int, plot: Path | None) -> None:
    """Streaming cross-entropy at 8K, 32K and 128K tokens in the arms on, reset and frozen."""
    backend, tokenizer = open_model(model)
    results: dict[str, Any] = {}
    curves: dict[str, list[float]] = {}
    for file in files:
        tokens = read_tokens(tokenizer, file, tail)[: LENGTHS[-1] + 1]
        scores = read_arms(backend, tokens, lambda _: None)
        means = at_lengths(scores, (*LENGTHS[:-1], len(tokens) - 1))
        results[name_of(file)] = means
        usable = len(scores["on"]) // BIN * BIN
        on, reset = (scores[arm][:usable].reshape(-1, BIN).mean(1) for arm in ("on", "reset"))
        curves[name_of(file)] = (100 * (on / reset - 1)).tolist()
        shown = ", ".join(f"{n}: {m['on']:.3f} ({percent(m, 'reset'):+.1f} %)" for n, m in means.items())
        click.echo(f"{name_of(file)}: {shown}", err=True)
    if plot:
        draw(curves, plot)
    click.echo(table(results, LENGTHS))
    click.echo(json.dumps({"lengths": summary(results, LENGTHS), "files": results}))


@main.command()
@FILES
@MODEL
@SEED
def needles(files: tuple[Path, ...], model: Path | None, seed: int) -> None:
    """Eight facts, then up to 32K tokens of each file, then eight questions with eight possible answers."""
    backend, tokenizer = open_model(model)
    rng = np.random.default_rng(seed)
    texts = texts_of(tokenizer, files, DISTANCES[-1])
    report = average([recall(backend, tokenizer, text, list(DISTANCES), rng) for text in texts])
    click.echo(json.dumps({"trials": len(texts), "chance": 1 / 8, "seed": seed, "arms": report}))


@main.command(name="shift")
@FILES
@MODEL
def domain_shift(files: tuple[Path, ...], model: Path | None) -> None:
    """A stream that changes source every 4,096 tokens and comes back to each."""
    backend, tokenizer = open_model(model)
    result = shift(backend, texts_of(tokenizer, files, 2 * PIECE + 1))
    names = [name_of(file) for file in files]
    click.echo(json.dumps({"files": names, **result} | {f"mean_{n}": float(np.mean(v)) for n, v in result.items()}))


@main.command(name="repetition")
@FILES
@MODEL
@SEED
def copying(files: tuple[Path, ...], model: Path | None, seed: int) -> None:
    """A passage of 256 tokens read again after 1K to 16K tokens of other text."""
    backend, tokenizer = open_model(model)
    rng = np.random.default_rng(seed)
    report = {}
    for gap in GAPS:
        texts = texts_of(tokenizer, files, 3 * PASSAGE + gap)
        report[gap] = {"texts": len(texts)} | repetition(backend, texts, gap, rng)
        click.echo(f"{gap}: {report[gap]}")
    click.echo(json.dumps({"passage": PASSAGE, "seed": seed, "gaps": report}))


if __name__ == "__main__":
    main()
