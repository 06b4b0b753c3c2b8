"""The bodies that completion requests may have, and what all requests for an answer have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from fednl_runtime.errors import RequestError
from fednl_runtime.history import Mode
from fednl_runtime.sampling import SamplingParams

Learn: TypeAlias = bool | Literal["dry_run"]

MAX_CHOICES = 32
"""Answers in one request: prompts times n."""
MAX_STOPS = 4
"""Stop strings in one request; a chat template may add its own."""
MAX_COMPLETION_LOGPROBS = 5
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


KINDS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of strings",
    "learn": 'true, false or "dry_run"',
    "messages": "a list of messages, each with a role and a content: a string or a list of text parts",
}
"""What a field may be of which there are several kinds: a validator tells of one kind only."""


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TurnFields(BaseModel):
    """The fields of every request for an answer; unknown ones are refused, not ignored.

    A misspelt `learn` that was silently ignored would teach the session what it should not know.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"presence_penalty": (0,), "frequency_penalty": (0,)}
    """OpenAI's fields that this server has not, with the values that ask for nothing."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # What clients of OpenAI send unasked, and what changes no answer here.
    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    verbosity: Any = None

    session_id: str | None = None
    session_mode: Mode | None = None
    session_version: int | None = None
    learn: Learn | None = None
    on_disconnect: Literal["rollback", "commit"] | None = None
    return_progress: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def check_supported(self) -> None:
        """Raise RequestError for what OpenAI has and this server has not."""
        for name, harmless in self.unsupported.items():
            if getattr(self, name) not in (None, *harmless):
                raise RequestError(f"{name} is not supported; leave it out.", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", "stream_options")

    def choices(self, num_prompts: int = 1) -> int:
        """Answers to each prompt. Raises RequestError if there are too many in all."""
        n = 1 if self.n is None else self.n
        if n < 1 or n * num_prompts > MAX_CHOICES:
            raise RequestError(f"n times the number of prompts must lie between 1 and {MAX_CHOICES}.", "n")
        return n

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def common_sampling(self, stop: tuple[str, ...] = (), **more: int | None) -> SamplingParams:
        """The sampling parameters asked for, the defaults where none are. Raises RequestError."""
        given = {name: getattr(self, name) for name in SAMPLING} | more
        asked = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(asked) > MAX_STOPS:
            raise RequestError(f"stop has {len(asked)} strings; at most {MAX_STOPS} are allowed.", "stop")
        stops = tuple(dict.fromkeys((*asked, *stop)))
        kept = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(stop=stops, logit_bias=self._bias(), **kept)

    def _bias(self) -> tuple[tuple[int, float], ...]:
        try:
            return tuple({int(token): bias for token, bias in (self.logit_bias or {}).items()}.items())
        except ValueError:
            raise RequestError("The keys of logit_bias must be token ids.", "logit_bias") from None


class CompletionRequest(TurnFields):
    """OpenAI's completion request and our extras."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**TurnFields.unsupported, "suffix": ("",), "best_of": (1,)}

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def sampling(self, most: int) -> SamplingParams:
        """The sampling parameters asked for, the defaults where none are. Raises RequestError.

        `most` is the largest number of tokens that the server lets a client ask for.
        """
        if self.logprobs is not None and self.logprobs > MAX_COMPLETION_LOGPROBS:
            raise RequestError(f"logprobs is {self.logprobs}; at most {MAX_COMPLETION_LOGPROBS}.", "logprobs")
        max_tokens = min(most, SamplingParams.max_tokens) if self.max_tokens is None else self.max_tokens
        return self.common_sampling(max_tokens=max_tokens, logprobs=self.logprobs)

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
