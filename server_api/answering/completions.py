"""OpenAI's completion objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fednl_runtime.server_api.answering.answers import Names
from fednl_runtime.server_api.answering.writer import Named, Scored


class CompletionShape:
    """How a completion looks, whole and in chunks."""

    names = Names("cmpl", "text_completion", "text_completion")

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its text: nothing."""
        return None

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, finish: str | None) -> dict[str, Any]:
        """A piece of a choice, which looks like the whole."""
        return {"text": text, "index": index, "logprobs": _logprobs(scored), "finish_reason": finish}

    whole = piece


def _logprobs(scored: Sequence[Scored] | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    return {
        "tokens": [s.token.text for s in scored],
        "token_logprobs": [s.token.logprob for s in scored],
        "top_logprobs": [_top(s) for s in scored],
        "text_offset": [s.offset for s in scored],
    }


def _top(scored: Scored) -> dict[str, float] | None:
    """The log-probabilities of the alternatives and of the token itself, by name."""
    named: tuple[Named, ...] = (*scored.top, scored.token)
    return None if scored.token.logprob is None else {n.text: n.logprob for n in named if n.logprob is not None}
