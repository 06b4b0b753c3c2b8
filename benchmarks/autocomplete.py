"""Personal autocomplete: keystrokes saved while an author types, with and without the session's history.

At the start of each word the model proposes the whole word, greedily; if it is right, one key takes it. A
proposal that is right follows the author's own tokens, so one reading of the text decides all of them. The
last line printed is a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from streams import read_tokens

from fednl_runtime.backend import FREEZE, LEARN, Backend, segments
from fednl_runtime.evaluate import FREEZE_AFTER, windows
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.state import Array, MemoryState, Tokens
from fednl_runtime.tokenizer import Tokenizer

Flags = npt.NDArray[np.bool_]


def proposals(backend: Backend, tokens: Tokens, adapt: Callable[[int], Array]) -> Tokens:
    """The likeliest token after each of tokens `[B, T]`, read from fresh sessions."""
    rows, length = tokens.shape
    stream = backend.open(MemoryState.zeros(backend.config, rows))
    out = np.empty((rows, length), np.int64)
    for part in segments(0, length, backend.segment):
        logits = stream.feed(tokens[:, part], np.broadcast_to(adapt(part.start), (rows, 2)))
        out[:, part] = logits.argmax(-1)
    return out


def with_history(backend: Backend, tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Proposals of a session that learns throughout, and of one whose slow levels stop early."""

    def adapt(position: int) -> Array:
        return np.array([LEARN, LEARN if position < FREEZE_AFTER else FREEZE], np.float32)

    on, frozen = proposals(backend, np.stack([tokens, tokens]), adapt)
    return on, frozen


def without_history(backend: Backend, tokens: Tokens) -> Tokens:
    """Proposals of sessions that know the last tokens only, as in the arm `reset` of `eval`."""
    out = np.empty(len(tokens), np.int64)
    for context, start, stop in windows(len(tokens)):
        row = proposals(backend, tokens[None, context:stop], lambda _: np.array([LEARN], np.float32))[0]
        out[start:stop] = row[start - context :]
    return out


def word_kinds(tokenizer: Tokenizer) -> tuple[Flags, Flags]:
    """Which tokens begin a word (a space and letters), and which go on with one (letters only)."""
    texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    begins = np.array([t[:1] == b" " and t[1:].isalpha() for t in texts])
    return begins, np.array([t.isalpha() for t in texts])


def saved_keys(tokens: Tokens, proposed: Tokens, tokenizer: Tokenizer, skip: int) -> tuple[int, int, int, int]:
    """Keys saved, characters, words taken and words, of the words that begin after `skip` tokens.

    `proposed[t]` is what the model expects after token t. A word of n letters that is taken saves n - 1 keys.
    """
    begins, goes_on = word_kinds(tokenizer)
    sizes = [len(tokenizer.token_bytes(t)) for t in tokens.tolist()]
    saved = taken = words = 0
    for start in np.flatnonzero(begins[tokens]).tolist():
        stop = start + 1
        while stop < len(tokens) and goes_on[tokens[stop]]:
            stop += 1
        if start <= skip or stop == len(tokens):
            continue
        words += 1
        right = (proposed[start - 1 : stop - 1] == tokens[start:stop]).all() and not goes_on[proposed[stop - 1]]
        if right:
            taken += 1
            saved += sum(sizes[start:stop]) - 2  # the space is typed or not in either case
    return saved, sum(sizes[skip:]), taken, words


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--tokens", "count", default=16384, show_default=True, help="Tokens of each file.")
@click.option("--skip", default=4096, show_default=True, help="Tokens at the start that are read but not counted.")
def main(files: tuple[Path, ...], model: Path | None, count: int, skip: int) -> None:
    """Read each of FILES as if its author typed it."""
    backend = load(model or default_model_path(), threads=1)
    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    report = {}
    for file in files:
        tokens = read_tokens(tokenizer, file)[:count]
        on, frozen = with_history(backend, tokens)
        arms = {"on": on, "reset": without_history(backend, tokens), "frozen": frozen}
        rows = {}
        for arm, proposed in arms.items():
            saved, characters, taken, words = saved_keys(tokens, proposed, tokenizer, skip)
            rows[arm] = {"keys_saved_percent": 100 * saved / characters, "words_taken_percent": 100 * taken / words}
        report[file.name.split(".")[0]] = rows
    click.echo(json.dumps({"tokens": count, "skip": skip, "files": report}))


if __name__ == "__main__":
    main()
