"""The endpoint's memory: rows in SQLite or Postgres, read and written in transactions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import Connection, Table, delete, event, func, insert, select, update

from fednl_runtime.fed_sync.errors import DatabaseError, Refusal
from fednl_runtime.fed_sync.fleet.tables import (
    DEVICES,
    METADATA,
    POPULATIONS,
    REFUSALS,
    TOKENS,
    UPDATES,
    VERSIONS,
    Device,
    Population,
    Token,
    Update,
    Version,
)

PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")
READ = "fednl_read"
"""The option of SQLite's connections that only read."""
BUSY_S = 30
"""Seconds that a transaction waits for another process."""

Row = TypeVar("Row", Population, Version, Device, Token, Update)


class Repository:
    """A database by its URL."""

    def __init__(self, url: str) -> None:
        """Open or create it. Raises DatabaseError."""
        with _in_our_words():
            self._engine = sqlalchemy.create_engine(url, **_options(url))
            self._reading: dict[str, Any] = {"isolation_level": "REPEATABLE READ"}
            if self._engine.dialect.name == "sqlite":
                self._reading = {READ: True}
                event.listen(self._engine, "connect", _prepare_sqlite)
                event.listen(self._engine, "begin", _begin_sqlite)
            METADATA.create_all(self._engine)

    @contextlib.contextmanager
    def read(self) -> Iterator[Records]:
        """A view of one moment. Raises DatabaseError."""
        with (
            _in_our_words(),
            self._engine.connect().execution_options(**self._reading) as connection,
            connection.begin(),
        ):
            yield Records(connection)

    @contextlib.contextmanager
    def write(self, population: str) -> Iterator[Records]:
        """A transaction that no other of the same population overlaps; an exception undoes it all.

        Raises:
            DatabaseError: the database is gone or busy for too long.
        """
        with _in_our_words(), self._engine.begin() as connection:
            connection.execute(select(POPULATIONS.c.name).where(POPULATIONS.c.name == population).with_for_update())
            yield Records(connection)

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()


class Records:
    """The rows as one transaction sees them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _one(self, kind: type[Row], table: Table, *where: Any) -> Row | None:
        row = self._connection.execute(select(table).where(*where)).mappings().one_or_none()
        return None if row is None else kind(**row)

    def _all(self, kind: type[Row], table: Table, *where: Any, order: Any, limit: int | None = None) -> list[Row]:
        query = select(table).where(*where).order_by(order).limit(limit)
        return [kind(**row) for row in self._connection.execute(query).mappings()]

    def _add(self, table: Table, row: Any) -> None:
        self._connection.execute(insert(table).values(dataclasses.asdict(row)))

    def population(self, name: str) -> Population:
        """A population. Raises Refusal `unknown_population`."""
        found = self._one(Population, POPULATIONS, POPULATIONS.c.name == name)
        if found is None:
            raise Refusal("unknown_population", "No population of that name is kept here. Check the address.")
        return found

    def has_population(self, name: str) -> bool:
        """Whether a population exists."""
        return self._one(Population, POPULATIONS, POPULATIONS.c.name == name) is not None

    def add(self, row: Population | Version | Device | Token | Update) -> None:
        """Add a row of any kind."""
        tables = {Population: POPULATIONS, Version: VERSIONS, Device: DEVICES, Token: TOKENS, Update: UPDATES}
        self._add(tables[type(row)], row)

    def change_population(self, name: str, **values: Any) -> None:
        """Set some columns of a population."""
        self._connection.execute(update(POPULATIONS).where(POPULATIONS.c.name == name).values(**values))

    def version(self, population: str, number: int) -> Version:
        """A version. Raises Refusal `unknown_version`."""
        found = self._one(Version, VERSIONS, VERSIONS.c.population == population, VERSIONS.c.version == number)
        if found is None:
            raise Refusal("unknown_version", f"Version {number} does not exist. Ask for the current one.")
        return found

    def versions(self, population: str, limit: int | None = None) -> list[Version]:
        """The newest versions, newest first."""
        return self._all(
            Version, VERSIONS, VERSIONS.c.population == population, order=VERSIONS.c.version.desc(), limit=limit
        )

    def published_after(self, population: str, number: int) -> list[int]:
        """The published versions above a number, in order."""
        c = VERSIONS.c
        query = select(c.version).where(c.population == population, c.version > number, c.state == "published")
        return list(self._connection.execute(query.order_by(c.version)).scalars())

    def resign(self, population: str, number: int, manifest: str, now: float) -> None:
        """Replace the manifest of a version."""
        where = (VERSIONS.c.population == population, VERSIONS.c.version == number)
        self._connection.execute(update(VERSIONS).where(*where).values(manifest=manifest, signed=now))

    def set_state(self, population: str, number: int, state: str) -> None:
        """Change the state of a version."""
        where = (VERSIONS.c.population == population, VERSIONS.c.version == number)
        self._connection.execute(update(VERSIONS).where(*where).values(state=state))

    def device(self, device_id: str) -> Device | None:
        """A device by its name."""
        return self._one(Device, DEVICES, DEVICES.c.id == device_id)

    def device_of_key(self, key_id: str) -> Device | None:
        """A device by its present key."""
        return self._one(Device, DEVICES, DEVICES.c.key_id == key_id)

    def devices(self, population: str) -> list[Device]:
        """All devices of a population, oldest first."""
        return self._all(Device, DEVICES, DEVICES.c.population == population, order=DEVICES.c.enrolled)

    def count_devices(self, population: str) -> int:
        """How many devices are active."""
        where = (DEVICES.c.population == population, DEVICES.c.status == "active")
        return self._connection.execute(select(func.count()).select_from(DEVICES).where(*where)).scalar_one()

    def change_device(self, device_id: str, **values: Any) -> None:
        """Set some columns of a device."""
        self._connection.execute(update(DEVICES).where(DEVICES.c.id == device_id).values(**values))

    def token(self, sha256: str) -> Token | None:
        """A token by the digest of its text."""
        return self._one(Token, TOKENS, TOKENS.c.sha256 == sha256)

    def use_token(self, sha256: str, device_id: str) -> None:
        """Note who used a token."""
        self._connection.execute(update(TOKENS).where(TOKENS.c.sha256 == sha256).values(device=device_id))

    def update(self, update_id: str) -> Update | None:
        """An accepted update."""
        return self._one(Update, UPDATES, UPDATES.c.id == update_id)

    def pending(self, population: str) -> list[Update]:
        """The updates of the open round, by id."""
        where = (UPDATES.c.population == population, UPDATES.c.status == "pending")
        return self._all(Update, UPDATES, *where, order=UPDATES.c.id)

    def vote(self, population: str, device_id: str, base_version: int, target: int) -> Update | None:
        """What a device has already sent for a base or into a round."""
        c = UPDATES.c
        where = (
            c.population == population,
            c.device == device_id,
            (c.base_version == base_version) | (c.target == target),
        )
        found = self._all(Update, UPDATES, *where, order=c.received, limit=1)
        return found[0] if found else None

    def settle(self, update_id: str, status: str, target: int) -> None:
        """Say what became of an update, and in which round."""
        self._connection.execute(update(UPDATES).where(UPDATES.c.id == update_id).values(status=status, target=target))

    def count_updates(self, population: str) -> Mapping[str, int]:
        """Accepted updates by status."""
        query = select(UPDATES.c.status, func.count()).where(UPDATES.c.population == population)
        return {status: int(count) for status, count in self._connection.execute(query.group_by(UPDATES.c.status))}

    def refuse(self, device_id: str, code: str, update_id: str, now: float) -> None:
        """Count a refusal; one row per device and code, so that no device can fill the database."""
        where = (REFUSALS.c.device == device_id, REFUSALS.c.code == code)
        values = {"count": REFUSALS.c.count + 1, "last": now, "update_id": update_id}
        if not self._connection.execute(update(REFUSALS).where(*where).values(values)).rowcount:
            values = {"device": device_id, "code": code, "count": 1, "last": now, "update_id": update_id}
            self._connection.execute(insert(REFUSALS).values(values))

    def refusal(self, device_id: str, update_id: str) -> str | None:
        """The code with which the last upload of that id was refused, if it is still known."""
        where = (REFUSALS.c.device == device_id, REFUSALS.c.update_id == update_id)
        query = select(REFUSALS.c.code).where(*where).order_by(REFUSALS.c.last.desc()).limit(1)
        return self._connection.execute(query).scalar_one_or_none()

    def count_refusals(self, population: str) -> Mapping[str, int]:
        """Refused uploads by code."""
        query = select(REFUSALS.c.code, func.sum(REFUSALS.c.count)).join(DEVICES, DEVICES.c.id == REFUSALS.c.device)
        rows = self._connection.execute(query.where(DEVICES.c.population == population).group_by(REFUSALS.c.code))
        return {code: int(count) for code, count in rows}

    def forget_updates(self, before: float) -> None:
        """Delete the rows of settled updates that came before a time."""
        where = (UPDATES.c.received < before, UPDATES.c.status != "pending")
        self._connection.execute(delete(UPDATES).where(*where))

    def forget_tokens(self, before: float) -> None:
        """Delete tokens that expired before a time."""
        self._connection.execute(delete(TOKENS).where(TOKENS.c.expires < before))

    def blobs_in_use(self, settled_since: float) -> set[str]:
        """Digests that versions and pending updates need, and updates that came after a time."""
        needed = set(self._connection.execute(select(VERSIONS.c.sha256)).scalars())
        needed |= set(self._connection.execute(select(VERSIONS.c.optimizer_sha256)).scalars())
        where = (UPDATES.c.status == "pending") | (UPDATES.c.received >= settled_since)
        return needed | set(self._connection.execute(select(UPDATES.c.sha256).where(where)).scalars())


def _options(url: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": BUSY_S}} if url.startswith("sqlite") else {"pool_pre_ping": True}


def _prepare_sqlite(connection: Any, _: Any) -> None:
    """Write-ahead log, and a commit that is on the disk when it returns."""
    connection.isolation_level = None  # the driver leaves BEGIN to us
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once: a transaction that reads first could not get it later without an error."""
    reading = connection.get_execution_options().get(READ, False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, ModuleNotFoundError) as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise DatabaseError(f"The database does not work ({reason}). Check its URL and that it is up.") from error
