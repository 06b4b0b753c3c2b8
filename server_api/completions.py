"""OpenAI's completion objects out of a turn's events."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fednl_runtime.text import TextStream
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer
from fednl_runtime.turn import Alternatives, PromptEvent, TokenEvent, TurnReport


@dataclasses.dataclass(frozen=True)
class Scored:
    """A token with its log-probability and its place in the text; a stop string may cut one off that is not `sure`."""

    text: str
    offset: int
    logprob: float | None
    top: dict[str, float] | None
    sure: bool


class ChoiceWriter:
    """Writes one choice: the text that is certain and the log-probabilities of its tokens."""

    def __init__(self, tokenizer: Tokenizer, echo: bool, logprobs: bool) -> None:
        self._tokenizer, self._echo, self._logprobs = tokenizer, echo, logprobs
        self._prompt = TextStream()
        self._written = 0
        self._scored: list[Scored] = []

    def write(self, event: PromptEvent | TokenEvent) -> str:
        """The text that `event` adds."""
        if isinstance(event, TokenEvent):
            return self._write_token(event)
        return self._write_prompt(event) if self._echo else ""

    def finish_prompt(self) -> str:
        """The rest of an echoed prompt to which no answer was asked for."""
        return self._counted(self._prompt.finish()) if self._echo else ""

    def logprobs(self) -> dict[str, Any] | None:
        """OpenAI's logprobs object of the prompt, and of the tokens whose text was written, since the last call."""
        if not self._logprobs:
            return None
        ready = [s for s in self._scored if s.sure or s.offset < self._written]
        self._scored = self._scored[len(ready) :]
        return {
            "tokens": [s.text for s in ready],
            "token_logprobs": [s.logprob for s in ready],
            "top_logprobs": [s.top for s in ready],
            "text_offset": [s.offset for s in ready],
        }

    def _counted(self, text: str) -> str:
        self._written += len(text)
        return text

    def _write_prompt(self, event: PromptEvent) -> str:
        pieces = []
        for i, (token, logprob) in enumerate(zip(event.tokens, event.logprobs, strict=True)):
            self._score(token, self._prompt.decoded, logprob, event.top[i] if event.top else (), sure=True)
            pieces.append(self._prompt.push(self._tokenizer.token_bytes(token)))
        return self._counted("".join(pieces))

    def _write_token(self, event: TokenEvent) -> str:
        self._score(event.token, self._prompt.decoded + event.offset, event.logprob, event.top, sure=False)
        return self._counted(event.text)

    def _score(self, token: int, offset: int, logprob: float | None, top: Alternatives, sure: bool) -> None:
        if self._logprobs:
            named = None if logprob is None else {self._name(t): p for t, p in (*top, (token, logprob))}
            self._scored.append(Scored(self._name(token), offset, logprob, named, sure))

    def _name(self, token: int) -> str:
        if token == self._tokenizer.end_of_text:
            return END_OF_TEXT
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    """One choice of a completion or of a chunk of it."""
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}


def usage(reports: Sequence[TurnReport], n: int) -> dict[str, int]:
    """Tokens of a request; a prompt counts once, whatever the number of its answers."""
    prompt = sum(report.prompt_tokens for report in reports[::n])
    completion = sum(report.completion_tokens for report in reports)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def session_object(report: TurnReport) -> dict[str, Any]:
    """What the turn did to its session."""
    return {
        "id": report.session_id,
        "version": report.version,
        "tokens_seen": report.tokens_seen,
        "learned": report.learned,
        "update_norm": report.update_norm,
        "surprise": report.surprise,
        "state_bytes": report.state_bytes,
    }


class CompletionFrame:
    """What all chunks of one completion share."""

    def __init__(self, model: str) -> None:
        self._shared = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def __call__(self, choices: Iterable[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The completion object, or one chunk of it, with `choices`."""
        return {**self._shared, "choices": list(choices), **fields}
