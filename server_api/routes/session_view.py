"""What the routes tell of a session: its versions, what was set, what was learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from fednl_runtime.engine import Engine
from fednl_runtime.history import Mark
from fednl_runtime.records import Record
from fednl_runtime.server_api.answering.turn_of import SESSION_HEADER
from fednl_runtime.server_api.errors import json_answer


def session_view(engine: Engine, record: Record) -> dict[str, Any]:
    """A session as a JSON object."""
    return {
        "id": record.key.id,
        "object": "session",
        "version": record.head.version,
        "tokens_seen": record.head.tokens_seen,
        "state_bytes": engine.state_bytes,
        "created": record.created,
        "used": record.used,
        "resident": engine.sessions.is_resident(record),
        "persisted": engine.persistent,
        **dataclasses.asdict(record.settings),
        "versions": [version_view(mark) for mark in record.marks],
    }


def version_view(mark: Mark) -> dict[str, Any]:
    """A version that can be gone back to as a JSON object."""
    return {
        "version": mark.version,
        "parent_version": mark.parent,
        "content_version": mark.content,
        "tokens_seen": mark.tokens_seen,
        "created": mark.created,
        "name": mark.name,
    }


def session_answer(engine: Engine, record: Record, status: int = 200) -> Response:
    """The answer that tells of one session; its version is in the headers too."""
    return json_answer(session_view(engine, record), status, version_headers(record))


def version_headers(record: Record) -> dict[str, str]:
    """Name and version of a session, for clients that see headers only."""
    version = record.head.version
    return {SESSION_HEADER: record.key.id, "x-session-version": str(version), "etag": f'W/"{version}"'}


def list_answer(data: Sequence[Mapping[str, Any]], limit: int, cursor: str) -> Response:
    """A page of at most `limit` of `data`, which has one more if there are more; go on after `last`."""
    page = data[:limit]
    last = page[-1][cursor] if page else None
    return json_answer({"object": "list", "data": page, "has_more": len(data) > limit, "last": last}, 200)
