"""Training text: sources on disk, the tokenizer, and lanes of continuous documents."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fednl_runtime.corpus import encode_documents, read_text
from fednl_runtime.errors import CheckpointError, FednlError, ModelFileError
from fednl_runtime.export.checkpoint import write_atomically
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer

TOKENIZER_SAMPLE = 2_000_000
"""Characters of each source that the tokenizer is trained on, spread over the source."""

TokenArray = npt.NDArray[np.uint16]


def find_sources(folder: Path, without: tuple[str, ...] = ()) -> list[Path]:
    """All `DOMAIN/SOURCE.txt[.xz]` below `folder`, sorted, but for the domains `without`.

    Raises:
        FednlError: there are none, or a domain to leave out does not exist.
    """
    paths = sorted(p for p in folder.glob("*/*") if p.name.endswith((".txt", ".txt.xz")))
    if unknown := set(without) - {p.parent.name for p in paths}:
        raise FednlError(f"{folder} has no domain {', '.join(sorted(unknown))} to leave out.")
    if not (kept := [p for p in paths if p.parent.name not in without]):
        raise FednlError(f"{folder} has no DOMAIN/SOURCE.txt or .txt.xz files to train on.")
    return kept


def sample(text: str, size: int, parts: int = 20) -> Iterator[str]:
    """At most `size` characters of a text in evenly spread parts."""
    if len(text) <= size:
        yield text
        return
    for start in np.linspace(0, len(text) - size // parts, parts, dtype=int):
        yield text[start : start + size // parts]


def train_tokenizer(sources: list[Path], vocab_size: int) -> str:
    """A byte-level BPE tokenizer, as JSON, with the end-of-text marker as its only special token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for p in sources for part in sample(read_text(p), TOKENIZER_SAMPLE)), trainer)
    return tokenizer.to_str()


def tokenizer_of(folder: Path, sources: list[Path], vocab_size: int) -> str:
    """The tokenizer of a run as JSON: the one in its folder, or a new one trained on its sources.

    Raises:
        CheckpointError: the one in the folder is damaged or too large for `vocab_size`.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, train_tokenizer(sources, vocab_size).encode())
    try:
        text = path.read_text("utf-8")
        Tokenizer(text, vocab_size)
    except (UnicodeDecodeError, ModelFileError) as error:
        raise CheckpointError(
            f"{path} is damaged or has more than {vocab_size} tokens. Choose another folder."
        ) from error
    return text


@dataclasses.dataclass(frozen=True)
class Source:
    """The tokens of one file, the tail held out for validation."""

    domain: str
    name: str
    train: TokenArray
    validation: TokenArray


def load_source(path: Path, tokenizer_json: str, cache: Path, held_out: int) -> Source:
    """Tokenise a file, or read its tokens from `cache`; at most `held_out` tokens of its end are for validation."""
    digest = hashlib.sha256(tokenizer_json.encode() + path.read_bytes()).hexdigest()[:16]
    cached = cache / f"{path.parent.name}-{path.name.split('.')[0]}-{digest}.npy"
    if not cached.exists():
        cache.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, encode_documents(Tokenizer(tokenizer_json), read_text(path)).astype(np.uint16))
        write_atomically(cached, buffer.getvalue())
    tokens = np.load(cached, mmap_mode="r")
    split = len(tokens) - min(held_out, len(tokens) // 10)
    return Source(path.parent.name, path.name.split(".")[0], tokens[:split], tokens[split:])


def domain_weights(sources: list[Source]) -> npt.NDArray[np.float64]:
    """Probability of each source: a domain counts by the square root of its tokens, shared by size."""
    sizes = np.array([len(s.train) for s in sources], float)
    domains = np.array([s.domain for s in sources])
    totals = np.array([sizes[domains == d].sum() for d in domains])
    weights = np.sqrt(totals) * sizes / np.maximum(totals, 1)
    return weights / weights.sum()


class Lanes:
    """`batch` endless streams, each a session that reads consecutive documents of one source.

    A lane reads between `run[0]` and `run[1]` tokens (log-uniform) from a random document start, then
    begins again elsewhere with a fresh memory. Records of a few lines thus share a session, as they
    do when such a source is streamed.
    """

    def __init__(
        self, sources: list[Source], batch: int, rng: np.random.Generator, run: tuple[int, int], end: int
    ) -> None:
        self.sources, self.rng, self.run = sources, rng, run
        self.weights = domain_weights(sources)
        self.starts = [np.concatenate([[0], np.flatnonzero(s.train[:-1] == end) + 1]) for s in sources]
        self.source, self.offset, self.left = (np.zeros(batch, np.int64) for _ in range(3))

    def begin(self, lane: int, window: int) -> None:
        """Give the lane a new source and place. Raises FednlError if no source is longer than a window."""
        if all(len(s.train) <= window for s in self.sources):
            raise FednlError(f"No source has more than {window} tokens to train on. Add text.")
        i = int(self.rng.choice(len(self.sources), p=self.weights))
        self.source[lane] = i
        self.offset[lane] = self.rng.choice(self.starts[i])
        length = np.exp(self.rng.uniform(*np.log(self.run)))
        self.left[lane] = max(1, int(length) // window)

    def next(self, window: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Tokens `[B, window + 1]` (the last is the next window's first) and the lanes that begin anew."""
        fresh = np.zeros(len(self.left), bool)
        rows = []
        for lane in range(len(self.left)):
            while self.left[lane] == 0 or self.offset[lane] + window + 1 > len(self.sources[self.source[lane]].train):
                self.begin(lane, window)
                fresh[lane] = True
            start = self.offset[lane]
            rows.append(self.sources[self.source[lane]].train[start : start + window + 1].astype(np.int64))
            self.offset[lane] += window
            self.left[lane] -= 1
        return np.stack(rows), fresh

    def state(self) -> dict[str, list[int]]:
        """Where every lane stands, for a checkpoint."""
        return {n: getattr(self, n).tolist() for n in ("source", "offset", "left")}

    def restore(self, state: dict[str, list[int]]) -> None:
        """Continue where `state` was taken."""
        for name, values in state.items():
            setattr(self, name, np.array(values, np.int64))
