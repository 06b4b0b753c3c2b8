"""OpenAI's chat completion objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fednl_runtime.server_api.answering.answers import Names
from fednl_runtime.server_api.answering.writer import Named, Scored


class ChatShape:
    """How a chat completion looks, whole and in chunks."""

    names = Names("chatcmpl", "chat.completion", "chat.completion.chunk")

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice: who speaks."""
        return _chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
        """A piece of a choice; the last one has a reason and no more text than was still held back."""
        return _chunk(index, {"content": text} if text else {}, scored, finish)

    def whole(self, index: int, text: str, scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _logprobs(scored), "finish_reason": finish}


def _chunk(index: int, delta: dict[str, Any], scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": _logprobs(scored), "finish_reason": finish}


def _logprobs(scored: Sequence[Scored] | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    content = [{**_named(s.token), "top_logprobs": [_named(rival) for rival in s.top]} for s in scored]
    return {"content": content, "refusal": None}


def _named(token: Named) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
