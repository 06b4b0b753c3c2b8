"""The engine: turns of many sessions on one model, each a transaction on its session's memory."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

import numpy as np

from fednl_runtime.backend import Backend
from fednl_runtime.errors import RequestError
from fednl_runtime.guard import NormCaps
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.scheduler import Job, Scheduler
from fednl_runtime.session import Session, SessionStore
from fednl_runtime.state import Array, state_bytes
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import Outcome, PromptEvent, TokenEvent, TurnReport, TurnRequest, run_turn

Event: TypeAlias = PromptEvent | TokenEvent | TurnReport


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What the engine takes on: turns side by side, turns waiting, and sizes a request may have."""

    slots: int = 4
    queue: int = 32
    busy_wait_s: float = 5.0
    """Seconds a turn waits for another that writes to its session."""
    max_prompt_tokens: int = 262_144
    max_tokens: int = 8_192
    session_bytes: int = 1 << 30
    """Memory for all committed sessions together."""


class Turn:
    """A turn that was started: exactly one of `commit` and `close` ends it, `close` may follow either."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job

    def commit(self, outcome: Outcome) -> TurnReport:
        """Make the turn's memory the session's, if it was to learn, and let the next turn begin."""
        try:
            if outcome.report.learned:
                self._engine.sessions.commit(outcome.base, outcome.after)
        finally:
            self.close()
        return outcome.report

    def close(self) -> None:
        """Roll back: the turn stops within one step and leaves no trace. After `commit`: nothing."""
        self._engine.scheduler.close(self._job)


class Engine:
    """Runs turns on a backend that its decode thread alone touches."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        limits: EngineLimits | None = None,
        caps: NormCaps | None = None,
    ) -> None:
        self.backend, self.tokenizer = backend, tokenizer
        self.limits, self.caps = limits or EngineLimits(), caps or NormCaps()
        self.state_bytes = state_bytes(backend.config)
        """Bytes of every session's memory, from its first token to its last."""
        session_bytes = self.state_bytes + 4 * backend.config.vocab_size  # with the logits kept next to the state
        self.sessions = SessionStore(backend.config, max(1, self.limits.session_bytes // session_bytes))
        self.scheduler = Scheduler(self.limits.slots, self.limits.queue, self.limits.busy_wait_s)

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
        job = Job(self._steps(request), deliver, request.session_id if request.writes else None)
        self.scheduler.submit(job)
        return Turn(self, job)

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

    def score(self, tokens: tuple[int, ...], session_id: str | None = None) -> Array:
        """Surprise -log p of each token `[T]` in nats, nan where nothing came before; nothing is learnt."""
        request = TurnRequest(tokens, SamplingParams(max_tokens=0), session_id, learn=False)
        pieces = [event.logprobs for event in self.turn(request) if isinstance(event, PromptEvent)]
        return -np.array([p for piece in pieces for p in piece], np.float64)

    def shutdown(self) -> None:
        """Stop the decode thread; turns that have not ended are rolled back."""
        self.scheduler.shutdown()

    def _steps(self, request: TurnRequest) -> Generator[PromptEvent | TokenEvent, None, Outcome]:
        if request.writes and request.session_id is not None:
            self.sessions.check_room(request.session_id)
        base: Session = self.sessions.open(request.session_id)
        return (yield from run_turn(self.backend, self.tokenizer, base, request, self.caps))
