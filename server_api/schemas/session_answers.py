"""What the routes of sessions answer, for the OpenAPI document; tests hold the server to it."""

from __future__ import annotations

from typing import Literal

from fednl_runtime.server_api.schemas.answers import Answer, SessionReport, Timings


class VersionView(Answer):
    """A version that can be gone back to."""

    version: int
    parent_version: int
    content_version: int
    tokens_seen: int
    created: float
    name: str | None


class SessionView(Answer):
    """A session: its versions, what was set."""

    id: str
    object: Literal["session"]
    version: int
    tokens_seen: int
    state_bytes: int
    created: float
    used: float
    resident: bool
    persisted: bool
    frozen: bool
    sync: bool
    ttl_s: float | None
    metadata: dict[str, str]
    versions: list[VersionView]


class SessionPage(Answer):
    """A page of sessions; go on after `last`."""

    object: Literal["list"]
    data: list[SessionView]
    has_more: bool
    last: str | None


class SnapshotPage(Answer):
    """The versions that have a name."""

    object: Literal["list"]
    data: list[VersionView]
    has_more: bool
    last: str | None


class UpdateView(Answer):
    """What made a version, and how much was learnt."""

    version: int
    kind: Literal["turn", "rollback", "reset", "fork", "import"]
    created: float
    tokens: int
    update_norm: float
    surprise: float | None
    frozen: bool
    request_id: str | None


class UpdatePage(Answer):
    """A page of the provenance log; go on after version `last`."""

    object: Literal["list"]
    data: list[UpdateView]
    has_more: bool
    last: int | None


class SessionDeleted(Answer):
    """A session that was forgotten."""

    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


class SnapshotDeleted(Answer):
    """A name that was dropped."""

    name: str
    object: Literal["session.snapshot.deleted"]
    deleted: Literal[True]


class IngestProgress(Answer):
    """How far a text was read, and how surprising the last piece was."""

    object: Literal["session.ingest.progress"]
    total: int
    processed: int
    time_ms: int
    surprise: float | None


class Ingested(Answer):
    """A text that was learnt."""

    object: Literal["session.ingest"]
    tokens: int
    session: SessionReport
    timings: Timings


class ScoreArm(Answer):
    """Surprise of each token in nats, null where nothing came before, and its mean."""

    mean: float | None
    surprise: list[float | None]


class ScoredSession(Answer):
    """The version that scored."""

    id: str
    version: int


class Scored(Answer):
    """A text scored by memories that learn from it and by ones that do not."""

    object: Literal["session.score"]
    session: ScoredSession
    tokens: list[int]
    pieces: list[str]
    arms: dict[Literal["learning", "frozen"], ScoreArm]
