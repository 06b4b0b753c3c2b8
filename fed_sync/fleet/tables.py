"""The tables of the aggregation endpoint and their rows; one schema for SQLite and Postgres."""

from __future__ import annotations

import dataclasses

from sqlalchemy import Column, Float, ForeignKey, Integer, MetaData, String, Table, Text, UniqueConstraint

METADATA = MetaData()
POPULATIONS = Table(
    "populations",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("schema", String(64), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("shapes", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("current", Integer, nullable=False),
    Column("target", Integer, nullable=False),
    Column("opened", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    Column("extensions", Integer, nullable=False),
    Column("releases", Integer, nullable=False),
    Column("paused", String(32)),
)
VERSIONS = Table(
    "versions",
    METADATA,
    Column("population", ForeignKey("populations.name"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("prev_version", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", Integer, nullable=False),
    Column("optimizer_sha256", String(64)),
    Column("created", Float, nullable=False),
    Column("members", Integer, nullable=False),
    Column("rule", String(32), nullable=False),
    Column("reason", Text),
    Column("epsilon", Float),
    Column("rollback_of", Integer),
    Column("manifest", Text),
    Column("signed", Float, nullable=False),
)
DEVICES = Table(
    "devices",
    METADATA,
    Column("id", String(40), primary_key=True),
    Column("population", ForeignKey("populations.name"), nullable=False),
    Column("key_id", String(32), nullable=False, unique=True),
    Column("public_key", String(44), nullable=False),
    Column("status", String(16), nullable=False),
    Column("enrolled", Float, nullable=False),
    Column("seen", Float, nullable=False),
)
TOKENS = Table(
    "tokens",
    METADATA,
    Column("sha256", String(64), primary_key=True),
    Column("population", ForeignKey("populations.name"), nullable=False),
    Column("expires", Float, nullable=False),
    Column("device", String(40)),
)
UPDATES = Table(
    "updates",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("population", ForeignKey("populations.name"), nullable=False, index=True),
    Column("device", ForeignKey("devices.id"), nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("target", Integer, nullable=False),
    Column("sha256", String(64), nullable=False, index=True),
    Column("num_tokens", Integer, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("received", Float, nullable=False),
    UniqueConstraint("population", "device", "base_version"),
    UniqueConstraint("population", "device", "target"),
)
REFUSALS = Table(
    "refusals",
    METADATA,
    Column("device", ForeignKey("devices.id"), primary_key=True),
    Column("code", String(40), primary_key=True),
    Column("count", Integer, nullable=False),
    Column("last", Float, nullable=False),
    Column("update_id", String(36), nullable=False),
)


@dataclasses.dataclass(frozen=True)
class Population:
    """A fleet that shares one rule set, and its open round; times are seconds since 1970."""

    name: str
    schema: str
    fingerprint: str
    shapes: str
    policy: str
    current: int
    target: int
    """The number that the open round will publish under."""
    opened: float
    deadline: float
    extensions: int
    """How often the open round passed its deadline with too few updates."""
    releases: int
    """Noised answers given so far."""
    paused: str | None
    """Why no updates are taken; None while they are."""


@dataclasses.dataclass(frozen=True)
class Version:
    """One set of rules: `published`, or in `quarantined` because of `reason`."""

    population: str
    version: int
    prev_version: int
    state: str
    sha256: str
    size: int
    optimizer_sha256: str | None
    created: float
    members: int
    rule: str
    signed: float = 0.0
    reason: str | None = None
    epsilon: float | None = None
    rollback_of: int | None = None
    manifest: str | None = None


@dataclasses.dataclass(frozen=True)
class Device:
    """An enrolled device: `active` or `revoked`."""

    id: str
    population: str
    key_id: str
    public_key: str
    status: str
    enrolled: float
    seen: float


@dataclasses.dataclass(frozen=True)
class Token:
    """Permission to enrol one device; `device` is who used it."""

    sha256: str
    population: str
    expires: float
    device: str | None = None


@dataclasses.dataclass(frozen=True)
class Update:
    """An accepted update: `pending`, then `counted`, `quarantined`, `expired` or `lost`, in round `target`."""

    id: str
    population: str
    device: str
    base_version: int
    target: int
    sha256: str
    num_tokens: int
    status: str
    received: float
