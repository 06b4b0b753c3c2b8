"""The bodies that the helper routes may have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from fednl_runtime.server_api.schemas.chat import Message, conversation


class TokenizeRequest(BaseModel):
    """llama.cpp's request; `add_special` and `parse_special` change nothing: text never becomes a special token."""

    model_config = ConfigDict(extra="forbid", strict=True)

    content: str
    add_special: Any = None
    parse_special: Any = None
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    """llama.cpp's request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: list[int]


class TemplateRequest(BaseModel):
    """llama.cpp's request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Message]

    def conversation(self) -> list[dict[str, str]]:
        """The messages, each with role and content as text. Raises RequestError."""
        return conversation(self.messages)
