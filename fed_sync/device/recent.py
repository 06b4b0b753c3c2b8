"""The text this device read lately, in a ring of bounded size: what its rules are trained on. It never leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednl_runtime.errors import StoreError
from fednl_runtime.fed_sync.device.database import Database
from fednl_runtime.session import SessionKey
from fednl_runtime.state import Tokens

log = logging.getLogger("fednl_runtime.sync")

BYTES_PER_TOKEN = 4
MAX_BYTES = 1 << 20
"""What is kept by default: 262,144 tokens, about 800 KB of text."""
SCHEMA = """
create table if not exists piece (id integer primary key autoincrement, session text not null, tokens blob not null,
  created real not null, start integer not null) strict;
create index if not exists piece_session on piece (session);
create index if not exists piece_start on piece (start);
create table if not exists secret (id integer primary key check (id = 0), value blob not null) strict;
"""


@dataclasses.dataclass(frozen=True)
class Recent:
    """Some text: token ids `[T]`, the tags of the sessions it is from, and the number of its last piece."""

    tokens: Tokens
    sessions: frozenset[str]
    last: int


class RecentText:
    """The ring; safe to use from several threads and processes.

    A session is known by its tag, an HMAC of its owner and name under a secret of this file.
    """

    def __init__(self, path: Path, end_of_text: int, max_bytes: int = MAX_BYTES) -> None:
        """Open or create it; token `end_of_text` goes between texts. Raises StoreError."""
        self._db = Database(path, SCHEMA, "NORMAL")  # the last turns may be lost to a power cut
        self._end, self._max_bytes = end_of_text, max_bytes
        with self._db.write() as db:
            db.execute("insert or ignore into secret values (0, ?)", (secrets.token_bytes(32),))
            (self._secret,) = db.execute("select value from secret").fetchone()

    def tag(self, key: SessionKey) -> str:
        """What a session is called here."""
        return hmac.new(self._secret, f"{key.owner}\0{key.id}".encode(), hashlib.sha256).hexdigest()[:32]

    def record(self, key: SessionKey, tokens: Sequence[int]) -> None:
        """Keep what a turn read and wrote, of a long turn the end; the oldest text makes room.

        A turn never fails because of it: if it cannot be kept, the log says why.
        """
        kept = np.asarray(tokens[-(self._max_bytes // BYTES_PER_TOKEN) :], "<u4").tobytes()
        if not kept:
            return
        try:
            with self._db.write() as db:
                row = db.execute("select start + length(tokens) from piece order by id desc limit 1").fetchone()
                start = row[0] if row else 0
                values = (self.tag(key), kept, time.time(), start)
                db.execute("insert into piece (session, tokens, created, start) values (?, ?, ?, ?)", values)
                db.execute("delete from piece where start < ?", (start + len(kept) - self._max_bytes,))
        except StoreError as error:
            log.warning("a turn's text was not kept for training: %s", error)

    def forget(self, key: SessionKey) -> None:
        """Delete all text of a session, leaving nothing of it in the file. Raises StoreError."""
        with self._db.write() as db:
            found = db.execute("delete from piece where session = ?", (self.tag(key),)).rowcount
        if found:
            self._db.scrub()

    def read(self, after: int = 0) -> Recent:
        """The text recorded after piece number `after`, session by session, each followed by the end-of-text token."""
        with self._db.read() as db:
            rows = db.execute("select session, tokens, id from piece where id > ? order by id", (after,)).fetchall()
        texts: dict[str, list[Tokens]] = {}
        for session, tokens, _ in rows:
            texts.setdefault(session, []).append(np.frombuffer(tokens, "<u4").astype(np.int64))
        end = np.array([self._end], np.int64)
        parts = [part for pieces in texts.values() for part in (*pieces, end)]
        return Recent(np.concatenate(parts) if parts else end[:0], frozenset(texts), rows[-1][2] if rows else after)

    def tokens(self) -> int:
        """How many tokens are kept."""
        with self._db.read() as db:
            (total,) = db.execute("select coalesce(sum(length(tokens)), 0) from piece").fetchone()
        return int(total) // BYTES_PER_TOKEN

    def close(self) -> None:
        """Close the file."""
        self._db.close()
