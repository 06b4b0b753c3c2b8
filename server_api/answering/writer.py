"""One answer as it is written: the text that is certain, and the log-probabilities of its tokens."""

from __future__ import annotations

import dataclasses

from fednl_runtime.text import TextStream
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer
from fednl_runtime.turn import Alternatives, PromptEvent, TokenEvent


@dataclasses.dataclass(frozen=True)
class Named:
    """A token by name: its bytes, the same as text, and its log-probability, None where nothing came before."""

    data: bytes
    text: str
    logprob: float | None


@dataclasses.dataclass(frozen=True)
class Scored:
    """A token, its likeliest rivals and its place in the text; a stop string may cut one off that is not `sure`."""

    token: Named
    top: tuple[Named, ...]
    offset: int
    sure: bool


class ChoiceWriter:
    """Writes one choice: the text that is certain and the tokens of it."""

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

    def scored(self) -> list[Scored] | None:
        """The tokens of the prompt and of the text written since the last call; None if they were not asked for."""
        if not self._logprobs:
            return None
        ready = [s for s in self._scored if s.sure or s.offset < self._written]
        self._scored = self._scored[len(ready) :]
        return ready

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
            rivals = tuple(self._named(rival, p) for rival, p in top)
            self._scored.append(Scored(self._named(token, logprob), rivals, offset, sure))

    def _named(self, token: int, logprob: float | None) -> Named:
        data = self._tokenizer.token_bytes(token)
        return Named(data, END_OF_TEXT if token == self._tokenizer.end_of_text else name_of(data), logprob)


def name_of(data: bytes) -> str:
    """The bytes of a token as text, written out in hexadecimal if they are none, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
