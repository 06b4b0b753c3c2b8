"""Sessions: a committed memory under a name, replaced whole when a turn succeeds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from fednl_runtime.state import Array, MemoryState


class SessionKey(NamedTuple):
    """The name of a session: its owner's, the id of an API key or "" without keys, and its own."""

    owner: str
    id: str


@dataclasses.dataclass(frozen=True)
class Session:
    """One committed version of a session; nothing in it is ever written to.

    `logits [V]` are the model's for the next token, None before the first one; `tail` is the
    unfinished UTF-8 character that the tokens seen end in. `key` is None for a memory that nobody keeps.
    `created` is when its session was, 0 if it is not stored yet: it tells a session from one that was
    deleted before and had the same name.
    """

    key: SessionKey | None
    state: MemoryState
    version: int = 0
    logits: Array | None = None
    tail: bytes = b""
    created: float = 0.0

    @property
    def id(self) -> str | None:
        """The session's own name."""
        return None if self.key is None else self.key.id

    @property
    def tokens_seen(self) -> int:
        """Tokens read since the session began."""
        return int(self.state.position[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the logits kept with it."""
        return self.state.nbytes + (0 if self.logits is None else self.logits.nbytes)
