"""A turn's answer as text, so that a retry can be given it again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fednl_runtime.turn import Alternatives, PromptEvent, TokenEvent, TurnReport


def pack(events: Iterable[PromptEvent | TokenEvent], report: TurnReport) -> str:
    """The events of a turn and its report as JSON."""
    return json.dumps([*map(vars, events), vars(report)])


def unpack(text: str) -> tuple[list[PromptEvent | TokenEvent], TurnReport]:
    """What `pack` made `text` of, the report marked as replayed."""
    *events, report = json.loads(text)
    return [_event(fields) for fields in events], TurnReport(**{**report, "replayed": True})


def _event(fields: dict[str, Any]) -> PromptEvent | TokenEvent:
    if "token" in fields:
        return TokenEvent(**{**fields, "top": _alternatives(fields["top"])})
    return PromptEvent(tuple(fields["tokens"]), tuple(fields["logprobs"]), tuple(map(_alternatives, fields["top"])))


def _alternatives(pairs: list[list[Any]]) -> Alternatives:
    return tuple((token, logprob) for token, logprob in pairs)
