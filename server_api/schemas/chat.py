"""The bodies that chat requests may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fednl_runtime.errors import RequestError
from fednl_runtime.sampling import MAX_LOGPROBS, SamplingParams
from fednl_runtime.server_api.schemas.completions import TurnFields

ROLES = ("system", "developer", "user", "assistant")
DEFAULT_MAX_TOKENS = 512
"""Tokens of an answer at most when the client names no number: a base model need not come to an end."""


class ContentPart(BaseModel):
    """A part of a message; only text is read."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None

    def as_text(self) -> str:
        """The text of the part. Raises RequestError if it is none."""
        if self.type != "text" or self.text is None:
            raise RequestError(f"A content part of type {self.type!r} cannot be read; send text parts.", "messages")
        return self.text


class Message(BaseModel):
    """A message; besides role and content it may have what OpenAI's own answers have, if that is empty."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and content as text. Raises RequestError."""
        if self.role not in ROLES:
            raise RequestError(f"The role {self.role!r} is none of {', '.join(ROLES)}.", "messages")
        if unread := sorted(name for name, value in (self.model_extra or {}).items() if value):
            raise RequestError(f"A message with {unread[0]} cannot be read; send role and content.", "messages")
        if self.content is None and self.role != "assistant":
            raise RequestError(f"A message of the role {self.role} needs a content.", "messages")
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.as_text() for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(TurnFields):
    """OpenAI's chat completion request and our extras."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TurnFields.unsupported,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    def conversation(self) -> list[dict[str, str]]:
        """The messages, each with role and content as text. Raises RequestError."""
        return conversation(self.messages)

    def sampling(self, stop: tuple[str, ...], most: int) -> SamplingParams:
        """The sampling parameters asked for, with the template's own stop strings. Raises RequestError.

        `most` is the largest number of tokens that the server lets a client ask for.
        """
        max_tokens = min(most, DEFAULT_MAX_TOKENS) if self._max_tokens() is None else self._max_tokens()
        return self.common_sampling(stop, max_tokens=max_tokens, logprobs=self._logprobs())

    def _max_tokens(self) -> int | None:
        named = [value for value in (self.max_completion_tokens, self.max_tokens) if value is not None]
        if len(set(named)) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them.", "max_tokens")
        return named[0] if named else None

    def _logprobs(self) -> int | None:
        wanted = self.top_logprobs or 0
        if wanted and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
        if not 0 <= wanted <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs is {wanted}; it must lie between 0 and {MAX_LOGPROBS}.", "top_logprobs")
        return wanted if self.logprobs else None


def conversation(messages: list[Message]) -> list[dict[str, str]]:
    """Messages, each with role and content as text. Raises RequestError, also if there are none."""
    if not messages:
        raise RequestError("messages is empty; send at least one.", "messages")
    return [message.plain() for message in messages]
