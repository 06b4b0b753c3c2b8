"""Conversations: which committed version a request that repeats its history continues from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Literal, TypeAlias

from fednl_runtime.errors import SnapshotNotFoundError

Mode: TypeAlias = Literal["append", "history", "auto"]
"""How a prompt relates to what its session has read: it follows, it repeats the conversation, or find out."""


def digest(text: bytes) -> str:
    """SHA-256 of the bytes of a conversation."""
    return hashlib.sha256(text).hexdigest()


def as_sent(text: bytes) -> bytes:
    """The bytes that a client sends back when it was sent `text`: what is no UTF-8 has become U+FFFD."""
    return text.decode("utf-8", "replace").encode()


EMPTY = digest(b"")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A committed version that can be gone back to; the default is a session that has read nothing.

    Versions only grow: going back makes a new version with the `content` of an old one. `parent` is the
    version that the turn began from, `anchor` the one that its conversation began from; `tokens`, `length`
    and `digest` are of the conversation's text since then, `prompt_length` and `prompt_digest` of that
    text up to the turn's answer. Text is compared in bytes, not in tokens: a client sends an answer back
    as text, which need not fall into the tokens that were sampled.
    """

    version: int = 0
    content: int = 0
    """Version whose turn wrote the memory; 0 is a fresh one."""
    parent: int = 0
    anchor: int = 0
    tokens_seen: int = 0
    tokens: int = 0
    length: int = 0
    digest: str = EMPTY
    prompt_length: int = 0
    prompt_digest: str = EMPTY
    created: float = 0.0
    """Seconds since the epoch."""
    name: str | None = None
    """What the user called this snapshot, if anything."""

    @classmethod
    def from_json(cls, text: str) -> Mark:
        """The mark that `dataclasses.asdict` and JSON made `text` of. Raises ValueError or TypeError."""
        mark = cls(**json.loads(text))
        for field in dataclasses.fields(cls):
            value, kinds = getattr(mark, field.name), (type(field.default), str if field.name == "name" else int)
            if type(value) not in kinds or (type(value) is int and value < 0):
                raise ValueError(f"{field.name} is {value!r}")
        return mark


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a turn begins: the version, its conversation's anchor, and the bytes of the prompt read before."""

    mark: Mark
    anchor: int
    skip: int = 0


def find_start(head: Mark, marks: Sequence[Mark], text: bytes, mode: Mode) -> Start:
    """Where a turn with the prompt `text` begins; `marks` are the versions kept, `head` the last of them.

    In mode `history` that is the longest kept version of the current conversation that `text` begins
    with, at worst the version before the conversation. Mode `auto` does the same if such a version has
    read anything, or if `text` begins with all that the conversation's first answer was an answer to (it is
    asked for again, or it comes back changed: a client trims it, a stop string cut it, a user edited it);
    otherwise `text` follows what was read, as in mode `append`, and begins a conversation.

    Raises:
        SnapshotNotFoundError: in mode `history`, the version before the conversation is not kept any more.
    """
    if mode == "append":
        return Start(head, head.version)
    conversation = [mark for mark in marks if mark.anchor == head.anchor and mark.length]
    if known := [mark for mark in conversation if _begins(text, mark)]:
        best = max(known, key=lambda mark: (mark.length, mark.version))
        return Start(best, best.anchor, best.length)
    repeated = any(mark.parent == mark.anchor and _begins_with_prompt(text, mark) for mark in conversation)
    before = Mark() if head.anchor == 0 else next((mark for mark in marks if mark.version == head.anchor), None)
    if before is not None and (mode == "history" or repeated):
        return Start(before, head.anchor)
    if mode == "history":
        raise SnapshotNotFoundError(
            f"Version {head.anchor}, which the conversation began from, is not kept any more. "
            'Send what follows with `session_mode` "append".'
        )
    return Start(head, head.version)


def _begins(text: bytes, mark: Mark) -> bool:
    """Whether `text` begins with what `mark` has read and goes on at the start of a character."""
    rest = text[mark.length : mark.length + 1]
    return len(text) >= mark.length and not b"\x80" <= rest < b"\xc0" and digest(text[: mark.length]) == mark.digest


def _begins_with_prompt(text: bytes, mark: Mark) -> bool:
    """Whether `text` begins with what `mark` had read before its answer; nothing begins only nothing."""
    if not mark.prompt_length:
        return not text
    return digest(text[: mark.prompt_length]) == mark.prompt_digest
