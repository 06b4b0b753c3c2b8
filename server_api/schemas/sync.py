"""What the routes of the sync agent answer, for the OpenAPI document; tests hold the server to it."""

from __future__ import annotations

from typing import Literal

from fednl_runtime.server_api.schemas.answers import Answer


class SyncError(Answer):
    """Why the last contact failed: the endpoint's code or ours, and when."""

    code: str
    message: str
    at: float


class OutboxCounts(Answer):
    """Updates by state, bytes that wait, and updates that newer ones pushed out."""

    pending: int
    sent: int
    accepted: int
    refused: int
    waiting_bytes: int
    dropped: int


class UpdateView(Answer):
    """An update that was made here."""

    id: str
    base_version: int
    num_tokens: int
    bytes: int
    attempts: int
    state: Literal["pending", "sent", "accepted", "refused"]
    code: str | None


class Traffic(Answer):
    """Bytes of a day in UTC."""

    up: int
    down: int


class Learnt(Answer):
    """The last training: streaming cross-entropy of held-out text before and after, in nats a token."""

    before: float
    after: float
    tokens: int


class SyncStatus(Answer):
    """The agent: what it uses, when it comes next, what failed."""

    state: Literal["idle", "waiting", "syncing", "paused"]
    endpoint: str
    population: str
    device_id: str | None
    version: int
    seen_version: int
    on_probation: bool
    next_contact: float
    failures: int
    clock_offset_s: float
    last_success: float | None
    last_error: SyncError | None
    hindrance: str | None
    reason: str | None
    learnt: Learnt | None
    refused: int | None
    refused_because: str | None
    recent_tokens: int
    outbox: OutboxCounts
    updates: list[UpdateView]
    bytes_today: Traffic
