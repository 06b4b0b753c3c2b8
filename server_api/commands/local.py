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
    from fednl_runtime.store import Journal
    from fednl_runtime.vault import StoreLimits

FILE = click.Path(dir_okay=False, path_type=Path)
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Threads of onnxruntime [default: the cores given to us]."
)
RULES = click.option("--rules", type=FILE, help="Learning rules to use, from `rules train` [default: the model's own].")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Command = TypeVar("Command", bound=Callable[..., Any])


def size(text: str) -> int:
    """Bytes of 1000000, 64K, 512M or 8G, in powers of 1024. Raises click.BadParameter."""
    digits, factor = text, 1
    if text[-1:].upper() in UNITS:
        digits, factor = text[:-1], UNITS[text[-1].upper()]
    if not digits.isdecimal():
        raise click.BadParameter(f"{text!r} is not a size; write 1000000, 64K, 512M or 8G.")
    return int(digits) * factor


def duration(text: str) -> float:
    """Seconds of 30s, 10m, 12h or 7d. Raises click.BadParameter."""
    digits, seconds = text[:-1], SECONDS.get(text[-1:], 0)
    if not (digits.isdecimal() and int(digits) * seconds):
        raise click.BadParameter(f"{text!r} is not a duration; write 30s, 10m, 12h or 7d.")
    return float(int(digits) * seconds)


def session_options(command: Command) -> Command:
    """The options of where sessions are kept, and how much of them; `kept_sessions` takes their values."""
    limits = [
        click.option(
            "--session-memory", type=size, default="1G", show_default=True, help="Memory for sessions in use."
        ),
        click.option("--session-disk", type=size, default="16G", show_default=True, help="Disk for all sessions."),
        click.option("--session-ttl", type=duration, help="Forget a session so long after its last use, as 12h or 7d."),
        click.option(
            "--versions",
            type=click.IntRange(1),
            default=8,
            show_default=True,
            help="Versions of a session to go back to.",
        ),
    ]
    where = [
        click.option(
            "--state-dir",
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder to keep sessions in [default: fednl-runtime in $XDG_STATE_HOME, or in ~/.local/state].",
        ),
        click.option("--in-memory", is_flag=True, help="Keep no session when the server stops."),
    ]
    for option in reversed(where + limits):
        command = option(command)
    return command


def kept_sessions(
    fingerprint: str,
    state_dir: Path | None,
    in_memory: bool,
    session_memory: int,
    session_disk: int,
    session_ttl: float | None,
    versions: int,
) -> tuple[Path | None, StoreLimits]:
    """The folder for the sessions of a model, None for none, and how much is kept."""
    from fednl_runtime.server_api.commands.state_dir import default_state_dir, model_folder
    from fednl_runtime.vault import StoreLimits

    if in_memory and state_dir is not None:
        raise click.UsageError("Give --state-dir or --in-memory, not both.")
    folder = None if in_memory else model_folder(state_dir or default_state_dir(), fingerprint)
    return folder, StoreLimits(session_memory, session_disk, versions, ttl_s=session_ttl)


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


def loaded(path: Path, threads: int | None, rules: Path | None) -> OnnxBackend:
    """A model file under the rules of a file, by default its own. Raises ModelFileError, RulesError."""
    from fednl_runtime.onnx_backend import load
    from fednl_runtime.rules import load_rules

    backend = load(path, threads)
    if rules is None:
        return backend
    found, _ = load_rules(rules)
    found.require(backend.model.rules, backend.fingerprint)
    return backend.with_rules(found.tensors)


@contextlib.contextmanager
def engine_on(
    backend: OnnxBackend,
    limits: EngineLimits | None = None,
    folder: Path | None = None,
    journal: Journal | None = None,
) -> Iterator[Engine]:
    """An engine on a loaded model that keeps its sessions in `folder`, shut down at the end. Raises StoreError."""
    from fednl_runtime.engine import Engine
    from fednl_runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    engine = Engine(backend, tokenizer, limits, folder=folder, journal=journal)
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
