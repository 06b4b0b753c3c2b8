"""What an agent has to remember over a restart: small facts by name, and the bytes it moved each day."""

from __future__ import annotations

import datetime
import json
from typing import Any

from fednl_runtime.fed_sync.device.database import Database

KEPT_DAYS = 31
SCHEMA = """
create table if not exists note (name text primary key, value text not null) strict, without rowid;
create table if not exists traffic (day text primary key, up integer not null, down integer not null) strict,
  without rowid;
"""


class Notes:
    """Facts as JSON values; safe to use from several threads."""

    def __init__(self, db: Database) -> None:
        """The notes in a database that has the tables of `SCHEMA`."""
        self._db = db

    def get(self, name: str, default: Any = None) -> Any:
        """A fact, `default` if it was never noted."""
        with self._db.read() as db:
            row = db.execute("select value from note where name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else default

    def set(self, **facts: Any) -> None:
        """Note facts, all in one transaction."""
        with self._db.write() as db:
            db.executemany(
                "insert or replace into note values (?, ?)", [(name, json.dumps(v)) for name, v in facts.items()]
            )

    def spend(self, now: float, up: int, down: int) -> None:
        """Count bytes sent and received at `now`, in seconds since 1970."""
        with self._db.write() as db:
            db.execute(
                "insert into traffic values (?, ?, ?) on conflict do update set up = up + excluded.up, "
                "down = down + excluded.down",
                (_day(now), up, down),
            )
            db.execute("delete from traffic where day < ?", (_day(now - KEPT_DAYS * 86400),))

    def spent(self, now: float) -> tuple[int, int]:
        """Bytes sent and received on the day of `now`, in UTC."""
        with self._db.read() as db:
            row = db.execute("select up, down from traffic where day = ?", (_day(now),)).fetchone()
        return row or (0, 0)


def _day(now: float) -> str:
    return datetime.datetime.fromtimestamp(now, datetime.UTC).date().isoformat()
