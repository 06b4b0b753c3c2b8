"""The sessions in use, kept ready in memory up to a number of bytes."""

from __future__ import annotations

import collections
import threading

from fednl_runtime.session import Session, SessionKey


class Resident:
    """Versions by session, the least recently used of which go first; safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.evictions = 0
        self._max_bytes = max_bytes
        self._sessions: collections.OrderedDict[SessionKey, tuple[int, Session]] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: SessionKey, content: int) -> Session | None:
        """The session, if it is here with the memory that version `content` wrote."""
        with self._lock:
            found, session = self._sessions.get(key, (None, None))
            if found != content:
                return None
            self._sessions.move_to_end(key)
            return session

    def holds(self, key: SessionKey, content: int) -> bool:
        """Whether the session is here with that memory; asking does not make it the last used."""
        with self._lock:
            return self._sessions.get(key, (None, None))[0] == content

    def put(self, key: SessionKey, content: int, session: Session) -> None:
        """Keep a session; the one that was put last stays whatever its size."""
        with self._lock:
            self._remove(key)
            self._sessions[key] = content, session
            self._bytes += session.nbytes
            while self._bytes > self._max_bytes and len(self._sessions) > 1:
                self._remove(next(iter(self._sessions)))
                self.evictions += 1

    def drop(self, key: SessionKey) -> None:
        """Let a session go, if it is here."""
        with self._lock:
            self._remove(key)

    def stats(self) -> dict[str, float]:
        """Sessions and bytes here, and how many were let go for want of room."""
        with self._lock:
            return {
                "resident_sessions": len(self._sessions),
                "resident_bytes": self._bytes,
                "evictions": self.evictions,
            }

    def _remove(self, key: SessionKey) -> None:
        if key in self._sessions:
            _, session = self._sessions.pop(key)
            self._bytes -= session.nbytes
