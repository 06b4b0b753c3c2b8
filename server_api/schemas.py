"""The bodies that requests may have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from fednl_runtime.errors import RequestError
from fednl_runtime.sampling import SamplingParams

MAX_CHOICES = 32
"""Answers in one request: prompts times n."""
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "logprobs",
)


KINDS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
}
"""What a field may be of which there are several kinds: a validator tells of one kind only."""


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(BaseModel):
    """OpenAI's completion request and our extras; unknown fields are refused, not ignored.

    A misspelt `learn` that was silently ignored would teach the session what it should not know.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None

    session_id: str | None = None
    learn: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def check_supported(self) -> None:
        """Raise RequestError for what OpenAI has and this server has not."""
        for name in ("suffix", "presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported; leave it out.", name)
        if self.best_of is not None and self.best_of > 1:
            raise RequestError("best_of above 1 is not supported; leave it out and use n.", "best_of")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", "stream_options")

    def sampling(self) -> SamplingParams:
        """The sampling parameters asked for, the defaults where none are. Raises RequestError."""
        given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(stop=tuple(stop), logit_bias=self._bias(), **given)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts asked for, each as text or as token ids; one empty prompt if none. Raises RequestError."""
        prompt = self.prompt if self.prompt is not None else ""
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is an empty list; give at least one prompt.", "prompt")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return prompt

    def choices(self, num_prompts: int) -> int:
        """Answers to each prompt. Raises RequestError if there are too many in all."""
        n = 1 if self.n is None else self.n
        if n < 1 or n * num_prompts > MAX_CHOICES:
            raise RequestError(f"n times the number of prompts must lie between 1 and {MAX_CHOICES}.", "n")
        return n

    def _bias(self) -> tuple[tuple[int, float], ...]:
        try:
            return tuple({int(token): bias for token, bias in (self.logit_bias or {}).items()}.items())
        except ValueError:
            raise RequestError("The keys of logit_bias must be token ids.", "logit_bias") from None
