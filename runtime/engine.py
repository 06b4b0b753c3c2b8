"""The engine: turns of many sessions on one model, each a transaction on its session's memory."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from fednl_runtime.backend import Backend
from fednl_runtime.errors import (
    AnswerGoneError,
    CancelledTurnError,
    RequestError,
    RetryMismatchError,
    VersionConflictError,
)
from fednl_runtime.guard import NormCaps
from fednl_runtime.history import Mark, Start, as_sent, digest, find_start
from fednl_runtime.receipt import pack, unpack
from fednl_runtime.records import Receipt, Record, Update
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.scheduler import Job, Scheduler
from fednl_runtime.session import Session
from fednl_runtime.slots import Slots
from fednl_runtime.state import Array, MemoryState, state_bytes
from fednl_runtime.state_file import StateFormat
from fednl_runtime.store import Journal, SessionStore
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import Beginning, Ending, PromptEvent, Steps, TokenEvent, TurnReport, TurnRequest, run_turn
from fednl_runtime.vault import StoreLimits

Event: TypeAlias = PromptEvent | TokenEvent | TurnReport
RETRY_S = 600
"""Seconds within which a request that its client sends again without a key is taken for the same one."""
MAX_ANSWER = 1 << 20
"""Characters of the largest answer that is kept for a retry: 8,000 tokens, or 1,500 with 20 logprobs each."""


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What the engine takes on: turns side by side, turns waiting, and sizes a request may have."""

    slots: int = 8
    queue: int = 32
    busy_wait_s: float = 5.0
    """Seconds a turn waits for another that writes to its session."""
    max_prompt_tokens: int = 262_144
    max_tokens: int = 8_192
    store: StoreLimits = dataclasses.field(default_factory=StoreLimits)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A turn that came to its end, and the version to commit, None if nothing is to be kept."""

    report: TurnReport
    after: Session | None = None
    mark: Mark | None = None
    events: tuple[PromptEvent | TokenEvent, ...] = ()
    """What a retry is answered with."""
    frozen: bool = False
    text: tuple[int, ...] = ()
    """Tokens that the turn read and chose."""


class Turn:
    """A turn that was started; whichever of `commit` and `close` comes first ends it, from any thread."""

    def __init__(self, engine: Engine, job: Job, stop: threading.Event, request: TurnRequest) -> None:
        self._engine, self._job, self._stop, self._request = engine, job, stop, request
        self._end = threading.Lock()  # taken once, by what ends the turn

    def commit(self, outcome: Outcome) -> TurnReport:
        """Make the turn's memory the session's, if it was to learn, and let the next turn begin.

        It may block for as long as storing takes; the session is kept from the next turn for as long.
        Raises CancelledTurnError after `close`, and what `SessionStore.commit` does.
        """
        if not self._end.acquire(blocking=False):
            raise CancelledTurnError("The turn had ended before it could be committed.")
        try:
            if outcome.after is None:
                return outcome.report
            return self._engine.commit(self._request, outcome)
        finally:
            self._engine.scheduler.close(self._job)

    def wrap_up(self) -> None:
        """Let the turn end at its next step with what it has; its outcome comes as ever."""
        self._stop.set()

    def close(self) -> None:
        """Roll back: the turn stops within one step and leaves no trace. After `commit`, or during it: nothing."""
        if self._end.acquire(blocking=False):
            self._engine.scheduler.close(self._job)


class Engine:
    """Runs turns on a backend that its decode thread alone touches."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        limits: EngineLimits | None = None,
        caps: NormCaps | None = None,
        folder: Path | None = None,
        journal: Journal | None = None,
    ) -> None:
        """An engine whose sessions are kept in `folder`, or in memory without one. Raises StoreError.

        The text of committed turns goes to `journal`, if there is one.
        """
        self.backend, self.tokenizer = backend, tokenizer
        self._own = backend
        self.limits, self.caps = limits or EngineLimits(), caps or NormCaps()
        self.state_bytes = state_bytes(backend.config)
        """Bytes of every session's memory, from its first token to its last."""
        self.persistent = folder is not None
        """Whether sessions outlive this process."""
        form = StateFormat(backend.config, backend.fingerprint, tokenizer.fingerprint)
        self.sessions = SessionStore(form, self.limits.store, folder, journal)
        self._slots = Slots(backend, self.limits.slots)
        self.scheduler = Scheduler(self.limits.slots, self.limits.queue, self.limits.busy_wait_s)

    def use_rules(self, rules: Mapping[str, Array]) -> None:
        """Run turns that begin from now on with other rules, by name; none are the model's own.

        Turns that run keep the rules they began with. Raises ModelFileError, and then nothing changes.
        """
        backend = self._own.with_rules(rules)
        slots = Slots(backend, self.limits.slots)
        slots.batch = self._slots.batch
        self.backend, self._slots = backend, slots

    def calibrate(self) -> None:
        """Measure, before any turn, how many turns are best run in one call of the model."""
        self._slots.calibrate()

    def check(self, request: TurnRequest) -> None:
        """Raise RequestError if `start` would: a token or a length the model cannot serve."""
        limits, vocab = self.limits, self.backend.config.vocab_size
        if len(request.prompt) > limits.max_prompt_tokens:
            raise RequestError(
                f"The prompt has {len(request.prompt)} tokens; send at most {limits.max_prompt_tokens} a turn.",
                "prompt",
            )
        if request.params.max_tokens > limits.max_tokens:
            raise RequestError(f"max_tokens is {request.params.max_tokens}; at most {limits.max_tokens}.", "max_tokens")
        if not all(0 <= token < vocab for token in request.prompt):
            raise RequestError(f"The prompt holds a token id outside 0 to {vocab - 1}.", "prompt")
        if not all(0 <= token < vocab for token, _ in request.params.logit_bias):
            raise RequestError(f"logit_bias names a token id outside 0 to {vocab - 1}.", "logit_bias")

    def start(self, request: TurnRequest, deliver: Callable[[Any], None]) -> Turn:
        """Queue a turn and return at once.

        `deliver` gets each PromptEvent and TokenEvent and at last an Outcome, which the caller commits
        or closes, or an exception; it is called from the decode thread and must not block.

        Raises:
            RequestError: a token or a length the model cannot serve.
            QueueFullError: too many turns wait already.
        """
        self.check(request)
        stop = threading.Event()
        job = Job(self._steps(request, stop), deliver, request.key if request.writes else None)
        self.scheduler.submit(job)
        return Turn(self, job, stop, request)

    def turn(self, request: TurnRequest) -> Iterator[Event]:
        """Run a turn: its events, then the report once it was committed.

        The turn commits when the iterator is asked for what follows the last token; closing the
        iterator before that rolls it back. Errors of the turn are raised here.
        """
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        turn = self.start(request, inbox.put)
        try:
            while not isinstance(event := inbox.get(), Outcome):
                if isinstance(event, Exception):
                    raise event
                yield event
            yield turn.commit(event)
        finally:
            turn.close()

    def score(
        self,
        tokens: tuple[int, ...],
        session_id: str | None = None,
        owner: str = "",
        learn: Literal[False, "dry_run"] = False,
    ) -> Array:
        """Surprise -log p of each token `[T]` in nats, nan where nothing came before; nothing is kept.

        With `learn` "dry_run" the slow levels learn from each token before they score those that follow.
        """
        request = TurnRequest(tokens, SamplingParams(max_tokens=0), session_id, learn, owner=owner)
        pieces = [event.logprobs for event in self.turn(request) if isinstance(event, PromptEvent)]
        return -np.array([p for piece in pieces for p in piece], np.float64)

    def commit(self, request: TurnRequest, outcome: Outcome) -> TurnReport:
        """Store the version that a turn ended with. Raises what `SessionStore.commit` does."""
        report, mark = outcome.report, outcome.mark
        assert outcome.after is not None, "nothing to commit"
        assert mark is not None, "a version has a mark"
        update = Update(
            version=mark.version,
            kind="turn",
            created=mark.created,
            tokens=report.prompt_tokens - report.cached_tokens + report.completion_tokens,
            update_norm=report.update_norm,
            surprise=report.surprise,
            frozen=outcome.frozen,
            request_id=request.request_id,
        )
        self.sessions.commit(outcome.after, mark, update, _receipt_of(request, outcome, mark), outcome.text)
        return report

    def shutdown(self) -> None:
        """Stop the decode thread; turns that have not ended are rolled back."""
        self.scheduler.shutdown()
        self.sessions.close()

    def _steps(self, request: TurnRequest, stop: threading.Event) -> Steps[Outcome]:
        if request.key is None:
            base = Session(None, MemoryState.zeros(self.backend.config))
            ending = yield from self._run(Beginning(base, request.prompt), request, stop)
            return Outcome(ending.report)
        record = self.sessions.find(request.key)
        if (receipt := self._receipt(record, request)) is not None:
            events, report = unpack(receipt.data)
            yield from events
            return Outcome(report)
        if request.expect_version not in (None, record.head.version):
            raise VersionConflictError(
                f"Session {request.session_id!r} is at version {record.head.version}, not {request.expect_version}."
            )
        if request.writes:
            self.sessions.check_room(request.key)
        text = self.tokenizer.decode_bytes(request.prompt)
        start = find_start(record.head, record.marks, text, request.mode)
        beginning = self._begin(record, start, request.prompt, text)
        self.sessions.touch(request.key)
        if not request.writes:
            ending = yield from self._run(beginning, request, stop)
            return Outcome(ending.report)
        return (yield from self._write(beginning, start, text, request, stop))

    def _receipt(self, record: Record, request: TurnRequest) -> Receipt | None:
        """The receipt of the turn that `request` asks for once more, if it does.

        Raises RetryMismatchError, AnswerGoneError.
        """
        retry = request.retry
        if retry is None or not request.writes or not (retry.key or retry.again):
            return None
        receipt = self.sessions.receipt(record.key, retry.key)
        if receipt is None:
            return None
        if retry.key is not None and receipt.digest != retry.digest:
            raise RetryMismatchError("The idempotency key was used with another request; take a new one.")
        fresh = receipt.created > time.time() - RETRY_S
        same = (receipt.version, receipt.digest) == (record.head.version, retry.digest)
        if retry.key is None and not (fresh and same):
            return None
        if not receipt.data:
            raise AnswerGoneError(f"The request was learnt as version {receipt.version}; its answer is not kept.")
        return receipt

    def _begin(self, record: Record, start: Start, prompt: tuple[int, ...], text: bytes) -> Beginning:
        """The memory a turn begins with, and what it has still to read."""
        base = self.sessions.load(record, start.mark)
        frozen = record.settings.frozen
        if not start.skip:
            return Beginning(base, prompt, start.mark.version, 0, frozen)
        rest = tuple(self.tokenizer.encode(text[start.skip :].decode("utf-8", "replace")))
        return Beginning(base, rest, start.mark.version, start.mark.tokens, frozen)

    def _run(self, beginning: Beginning, request: TurnRequest, stop: threading.Event) -> Steps[Ending]:
        return (yield from run_turn(self._slots, self.tokenizer, beginning, request, self.caps, stop))

    def _write(
        self, beginning: Beginning, start: Start, text: bytes, request: TurnRequest, stop: threading.Event
    ) -> Steps[Outcome]:
        """Run a turn that writes to its session; note what its version will be known by."""
        events: list[PromptEvent | TokenEvent] = []
        steps, logits = self._run(beginning, request, stop), None
        while True:
            try:
                step = steps.send(logits)
            except StopIteration as end:
                ending: Ending = end.value
                break
            if isinstance(step, TokenEvent) or (request.score_prompt and isinstance(step, PromptEvent)):
                events.append(step)
            logits = yield step
        after, report = ending.after, dataclasses.replace(ending.report, persisted=self.persistent)
        read = text[: start.skip] + self.tokenizer.decode_bytes(ending.prompt)
        said = as_sent(read + self.tokenizer.decode_bytes(ending.answer))
        now = time.time()
        mark = Mark(
            version=after.version,
            content=after.version,
            parent=start.mark.version,
            anchor=start.anchor,
            tokens_seen=after.tokens_seen,
            tokens=report.prompt_tokens + report.completion_tokens,
            length=len(said),
            digest=digest(said),
            prompt_length=len(read),
            prompt_digest=digest(read),
            created=now,
        )
        return Outcome(report, after, mark, tuple(events), beginning.frozen, (*ending.prompt, *ending.answer))


def _receipt_of(request: TurnRequest, outcome: Outcome, mark: Mark) -> Receipt | None:
    """What a retry of a turn will be answered with, if it can be told from a new one."""
    retry = request.retry
    if retry is None:
        return None
    answer = pack(outcome.events, outcome.report)
    return Receipt(mark.version, retry.digest, answer if len(answer) <= MAX_ANSWER else "", retry.key, mark.created)
