"""One turn: read the prompt, answer token by token, end with the memory that would follow."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Generator
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from fednl_runtime.backend import FREEZE, LEARN
from fednl_runtime.crash import crash_point
from fednl_runtime.errors import MemoryBreachError
from fednl_runtime.guard import NormCaps, check_memory, update_norm
from fednl_runtime.history import Mode
from fednl_runtime.sampling import SamplingParams, log_softmax, sample, top_logprobs
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.slots import Feed, Slot, Slots
from fednl_runtime.state import Array
from fednl_runtime.text import TextStream, unfinished
from fednl_runtime.tokenizer import Tokenizer

Alternatives: TypeAlias = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Retry:
    """What tells a turn that was committed before from a new one.

    `digest` is of the request. A turn under a `key` used before is answered again; without a key, one
    that is sent `again`, as its client says, is answered again if it was the session's last.
    """

    digest: str
    key: str | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True)
class TurnRequest:
    """What a turn reads and how it answers.

    With `learn` false, or without a session, the memory is a scratch copy that nobody keeps and whose
    slow levels are left alone; with "dry_run" they learn, and the copy is thrown away too.
    `score_prompt` asks for alternatives to the prompt's tokens too, as many as `params.logprobs`.
    `owner` is whose session it is; `expect_version` the version it must be at; `mode` whether the
    prompt repeats what the session has read.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    session_id: str | None = None
    learn: bool | Literal["dry_run"] = True
    score_prompt: bool = False
    choice: int = 0
    owner: str = ""
    mode: Mode = "append"
    expect_version: int | None = None
    retry: Retry | None = None
    request_id: str | None = None

    @property
    def key(self) -> SessionKey | None:
        """Owner and name of the session, None without one."""
        return None if self.session_id is None else SessionKey(self.owner, self.session_id)

    @property
    def writes(self) -> bool:
        """Whether the turn means to commit a new version of a session."""
        return self.learn is True and self.session_id is not None


@dataclasses.dataclass(frozen=True)
class PromptEvent:
    """A piece of the prompt was read; log-probabilities in nats, None where nothing came before."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[Alternatives, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """A token was chosen.

    `text` is what has become certain to belong to the answer and may be empty or of several tokens;
    `offset` counts the characters decoded before the token. The last token has a `finish_reason`.
    """

    token: int
    text: str
    offset: int
    logprob: float | None = None
    top: Alternatives = ()
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class TurnReport:
    """What a turn did, told once it was committed or thrown away.

    `prompt_tokens` are the whole prompt's, of which `cached_tokens` were in the memory already: a
    committed turn has read prompt_tokens - cached_tokens + completion_tokens tokens, the one that
    ended the answer included. `surprise` is the mean of -log p over the prompt's tokens in nats, None if
    none had a prediction; `update_norm` is the Frobenius norm of the change of the slow memories, also
    of a turn that was thrown away.
    """

    session_id: str | None
    version: int
    parent_version: int
    """Version whose memory the turn began from."""
    tokens_seen: int
    learned: bool
    update_norm: float
    surprise: float | None
    state_bytes: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    persisted: bool = False
    """Whether the new version outlives this process."""
    replayed: bool = False
    """Whether this is the answer of a turn that was committed before."""


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where a turn begins: its memory, the tokens that are still to be read, and what was read of the prompt before."""

    base: Session
    tokens: tuple[int, ...]
    parent: int = 0
    cached_tokens: int = 0
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """A turn that came to its end: the memory that would follow, the tokens read and chosen, and the report."""

    after: Session
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    report: TurnReport


T = TypeVar("T")
Steps: TypeAlias = Generator[PromptEvent | TokenEvent | Feed, Any, T]
"""A turn under way: it yields events for its caller, and feeds for which it is sent logits `[T, V]`."""


class Reader:
    """A place among the turns with the logits it is at: reads tokens and says how likely each was."""

    def __init__(self, slot: Slot, base: Session) -> None:
        self._slot = slot
        self._position = base.tokens_seen
        self.logits = base.logits

    def room(self) -> int:
        """Tokens that may be read in the next call: what is left of a segment, and what neighbours leave time for."""
        slots = self._slot.slots
        return min(slots.piece, slots.backend.segment - self._position % slots.backend.segment)

    def read(self, tokens: tuple[int, ...]) -> Generator[Feed, Array, Array]:
        """Read tokens `[T]`, `room` of them at most; return the logits `[T or T-1, V]` that predicted the last of them.

        The tokens are yielded for whoever runs the model, the logits `[T, V]` that follow them come back.
        """
        logits = yield Feed(self._slot, tokens)
        self._position += len(tokens)
        if not np.isfinite(logits).all():
            raise MemoryBreachError("The model's output is not finite; the turn was discarded.")
        before = [] if self.logits is None else [self.logits[None]]
        predicted = np.concatenate([*before, logits[:-1]])
        self.logits = logits[-1].copy()
        return predicted

    def snapshot(self, base: Session, tail: bytes) -> Session:
        """The version that follows `base` after what was read."""
        state, version = self._slot.snapshot(), base.version + 1
        return dataclasses.replace(base, state=state, version=version, logits=self.logits, tail=tail)


def run_turn(
    slots: Slots,
    tokenizer: Tokenizer,
    start: Beginning,
    request: TurnRequest,
    caps: NormCaps,
    stop: threading.Event,
) -> Steps[Ending]:
    """Run a turn on a scratch copy of its base, with at most one call of the model between two events.

    Once `stop` is set nothing more is read: the turn ends with what it has.

    Raises:
        MemoryBreachError: the memory it would leave is not fit to keep.
    """
    base, learns = start.base, request.learn is not False and not start.frozen
    with contextlib.closing(slots.open(base.state, LEARN if learns else FREEZE)) as slot:
        reader = Reader(slot, base)
        tokens = start.tokens or (() if base.logits is not None else (tokenizer.end_of_text,))
        tokens, surprise = yield from read_prompt(reader, tokens, request, stop)
        tail = unfinished(base.tail + tokenizer.decode_bytes(tokens))
        answer, finish_reason = yield from generate(reader, tokenizer, tokens, request, tail, stop)
        crash_point("turn_after_answer")
        after = reader.snapshot(base, unfinished(tail + tokenizer.decode_bytes(answer)))
    check_memory(after.state, caps)
    kept = after if request.writes else base
    return Ending(
        after,
        tokens,
        tuple(answer),
        TurnReport(
            session_id=base.id,
            version=kept.version,
            parent_version=start.parent,
            tokens_seen=kept.tokens_seen,
            learned=request.writes,
            update_norm=update_norm(base.state, after.state),
            surprise=float(np.mean(surprise)) if surprise else None,
            state_bytes=after.state.nbytes,
            prompt_tokens=start.cached_tokens + len(tokens),
            cached_tokens=start.cached_tokens,
            completion_tokens=len(answer),
            finish_reason=finish_reason,
        ),
    )


def read_prompt(
    reader: Reader, tokens: tuple[int, ...], request: TurnRequest, stop: threading.Event
) -> Steps[tuple[tuple[int, ...], list[float]]]:
    """Read the prompt; return the tokens read, all unless `stop` was set, and the surprise of those that had one."""
    surprise: list[float] = []
    read = 0
    while read < len(tokens) and not stop.is_set():
        piece = tokens[read : read + reader.room()]
        event = prompt_event(piece, (yield from reader.read(piece)), request)
        surprise += [-p for p in event.logprobs if p is not None]
        read += len(piece)
        yield event
        crash_point("turn_in_prompt")
    return tokens[:read], surprise


def prompt_event(tokens: tuple[int, ...], logits: Array, request: TurnRequest) -> PromptEvent:
    """The event of a piece of the prompt, from the logits `[T or T-1, V]` that predicted its tokens."""
    rows = log_softmax(logits) if len(logits) else logits
    known = len(rows)
    scored = rows[np.arange(known), np.array(tokens[len(tokens) - known :], np.int64)]
    unknown = len(tokens) - known
    top: tuple[Alternatives, ...] = ()
    if request.score_prompt:
        top = ((),) * unknown + tuple(top_logprobs(row, request.params.logprobs or 0) for row in rows)
    return PromptEvent(tokens, (None,) * unknown + tuple(map(float, scored)), top)


def generate(
    reader: Reader,
    tokenizer: Tokenizer,
    prompt: tuple[int, ...],
    request: TurnRequest,
    tail: bytes,
    stop: threading.Event,
) -> Steps[tuple[list[int], str]]:
    """Choose and read up to max_tokens tokens; return them and why the answer ended."""
    params, rng = request.params, request.params.rng(request.choice)
    text = TextStream(params.stop, tail)
    seen, answer = set(prompt), list[int]()
    finish_reason = None
    while finish_reason is None and len(answer) < params.max_tokens and not stop.is_set():
        assert reader.logits is not None, "a prompt is never empty before the first token"
        token = sample(reader.logits, params, rng, seen)
        seen.add(token)
        answer.append(token)
        event = token_event(token, text, tokenizer, reader.logits, params, len(answer) == params.max_tokens)
        finish_reason = event.finish_reason
        yield event
        yield from reader.read((token,))
        crash_point("turn_in_answer")
    return answer, finish_reason or "length"


def token_event(
    token: int, text: TextStream, tokenizer: Tokenizer, logits: Array, params: SamplingParams, last: bool
) -> TokenEvent:
    """The event of a token chosen from `logits` [V]; pushes its bytes into `text`."""
    offset = text.decoded
    piece = text.push(tokenizer.token_bytes(token))
    finish_reason = None
    if token == tokenizer.end_of_text or last:
        piece += text.finish()
        finish_reason = "length"
    if token == tokenizer.end_of_text or text.stopped:
        finish_reason = "stop"
    if params.logprobs is None:
        return TokenEvent(token, piece, offset, finish_reason=finish_reason)
    row = log_softmax(logits)
    return TokenEvent(token, piece, offset, float(row[token]), top_logprobs(row, params.logprobs), finish_reason)
