"""An engine in this process, and what the commands that use one have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from fednl_runtime.engine import Engine, EngineLimits
    from fednl_runtime.onnx_backend import OnnxBackend

FILE = click.Path(dir_okay=False, path_type=Path)
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Threads of onnxruntime [default: the cores given to us]."
)
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
Command = TypeVar("Command", bound=Callable[..., Any])


def size(text: str) -> int:
    """Bytes of 1000000, 64K, 512M or 8G, in powers of 1024. Raises click.BadParameter."""
    digits, factor = text, 1
    if text[-1:].upper() in UNITS:
        digits, factor = text[:-1], UNITS[text[-1].upper()]
    if not digits.isdecimal():
        raise click.BadParameter(f"{text!r} is not a size; write 1000000, 64K, 512M or 8G.")
    return int(digits) * factor


def sampling_options(max_tokens: int) -> Callable[[Command], Command]:
    """The options of commands that generate text."""
    options = [
        click.option("--max-tokens", default=max_tokens, show_default=True, help="Tokens to generate at most."),
        click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest token each time."),
        click.option("--top-k", default=0, help="Choose among the k likeliest tokens only; 0 is off."),
        click.option("--top-p", default=1.0, help="Choose among the likeliest tokens that make up p."),
        click.option("--min-p", default=0.0, help="Leave out tokens less likely than p times the likeliest."),
        click.option("--repetition-penalty", default=1.0, help="Above 1, tokens used already become less likely."),
        click.option("--seed", type=int, help="The same seed gives the same text."),
    ]

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@contextlib.contextmanager
def engine_on(backend: OnnxBackend, limits: EngineLimits | None = None) -> Iterator[Engine]:
    """An engine on a loaded model, shut down at the end."""
    from fednl_runtime.engine import Engine
    from fednl_runtime.tokenizer import Tokenizer

    engine = Engine(backend, Tokenizer(backend.tokenizer_json, backend.config.vocab_size), limits)
    try:
        yield engine
    finally:
        engine.shutdown()


@contextlib.contextmanager
def local_engine(path: Path | None, threads: int | None) -> Iterator[Engine]:
    """An engine on a model file, by default the shipped one. Raises ModelFileError."""
    from fednl_runtime.model_file import default_model_path
    from fednl_runtime.onnx_backend import load

    with engine_on(load(path or default_model_path(), threads)) as engine:
        yield engine
