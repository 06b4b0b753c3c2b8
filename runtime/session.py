"""Sessions: a committed memory under a name, replaced whole when a turn succeeds."""

from __future__ import annotations

import dataclasses
import threading

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import SessionLimitError, SessionNotFoundError
from fednl_runtime.state import Array, MemoryState


@dataclasses.dataclass(frozen=True)
class Session:
    """One committed version of a session; nothing in it is ever written to.

    `logits [V]` are the model's for the next token, None before the first one; `tail` is the
    unfinished UTF-8 character that the tokens seen end in.
    """

    id: str | None
    state: MemoryState
    version: int = 0
    logits: Array | None = None
    tail: bytes = b""

    @property
    def tokens_seen(self) -> int:
        """Tokens read since the session began."""
        return int(self.state.position[0])


class SessionStore:
    """The committed sessions in memory, bounded in number; safe to use from several threads."""

    def __init__(self, config: HopeConfig, max_sessions: int) -> None:
        self._config = config
        self._max_sessions = max_sessions
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def get(self, session_id: str) -> Session:
        """The committed version of a session.

        Raises:
            SessionNotFoundError: nothing was ever committed under that name.
        """
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(f"There is no session {session_id!r}.")
        return session

    def open(self, session_id: str | None) -> Session:
        """The committed version, or a fresh session at version 0 when there is none."""
        with self._lock:
            session = self._sessions.get(session_id) if session_id is not None else None
        return session or Session(session_id, MemoryState.zeros(self._config))

    def check_room(self, session_id: str) -> None:
        """Raise SessionLimitError if `session_id` is new and no further session fits."""
        with self._lock:
            self._check_room(session_id)

    def commit(self, base: Session, after: Session) -> None:
        """Replace `base` by `after`, the version that follows it.

        Raises:
            SessionNotFoundError: the session was deleted since `base` was read; it stays deleted.
            SessionLimitError: the session is new and no further one fits.
        """
        assert after.id is not None, "an ephemeral turn has nothing to commit"
        assert after.version == base.version + 1, "commit the version that follows"
        with self._lock:
            if self._sessions.get(after.id) is not (base if base.version else None):
                raise SessionNotFoundError(
                    f"Session {after.id!r} was deleted while the turn ran; the turn is gone too."
                )
            self._check_room(after.id)
            self._sessions[after.id] = after

    def delete(self, session_id: str) -> None:
        """Forget a session; a turn that is running on it will not bring it back.

        Raises:
            SessionNotFoundError: there is no such session.
        """
        with self._lock:
            if self._sessions.pop(session_id, None) is None:
                raise SessionNotFoundError(f"There is no session {session_id!r}.")

    def _check_room(self, session_id: str) -> None:
        if session_id not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise SessionLimitError(
                f"{len(self._sessions)} sessions fill the memory set aside for them; delete one or raise the limit."
            )
