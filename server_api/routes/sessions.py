"""Routes of sessions: make, look at, set, go back, fork, carry away, forget.

Their functions touch the disk and are no coroutines: FastAPI runs them in threads.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fednl_runtime.errors import SessionNotFoundError, StateError
from fednl_runtime.records import Settings
from fednl_runtime.server_api.answering.turn_of import SESSION_ID
from fednl_runtime.server_api.errors import StateFileError, json_answer
from fednl_runtime.server_api.routes.session_view import (
    list_answer,
    session_answer,
    session_view,
    version_headers,
    version_view,
)
from fednl_runtime.server_api.schemas.sessions import (
    CreateRequest,
    ForkRequest,
    RollbackRequest,
    SettingsRequest,
    SnapshotRequest,
    new_name,
)
from fednl_runtime.server_api.served import owner_of, served_by
from fednl_runtime.session import SessionKey
from fednl_runtime.store import SessionStore

router = APIRouter(prefix="/v1/sessions")
Limit = Annotated[int, Query(ge=1, le=1000)]
OCTETS = "application/octet-stream"
MAX_VERSION = 2**63 - 1
"""The largest that the database can be asked for."""


def store_of(request: Request) -> SessionStore:
    """The sessions of the engine that is served."""
    return served_by(request).engine.sessions


def key_of(session_id: str, request: Request) -> SessionKey:
    """The caller's session of that name. Raises SessionNotFoundError for what can be no name."""
    if not SESSION_ID.fullmatch(session_id):
        raise SessionNotFoundError(f"There is no session {session_id[:200]!r}.")
    return SessionKey(owner_of(request), session_id)


@router.post("", status_code=201)
def create_session(request: Request, body: CreateRequest | None = None) -> Response:
    """Make a session that has read nothing."""
    engine, body = served_by(request).engine, body or CreateRequest()
    settings = dataclasses.replace(Settings(ttl_s=engine.limits.store.ttl_s), **body.changes())
    record = engine.sessions.create(SessionKey(owner_of(request), new_name(body.id)), settings)
    return session_answer(engine, record, 201)


@router.get("")
def list_sessions(request: Request, limit: Limit = 100, after: str = "") -> Response:
    """The caller's sessions by name, those that follow `after`."""
    engine = served_by(request).engine
    records = engine.sessions.page(owner_of(request), after, limit + 1)
    return list_answer([session_view(engine, record) for record in records], limit, "id")


@router.post("/import", status_code=201)
async def import_session(request: Request, id: str | None = None) -> Response:
    """Make a session out of an exported file, which is checked whole first."""
    data = await request.body()
    return await run_in_threadpool(_import, request, new_name(id), data)


def _import(request: Request, name: str, data: bytes) -> Response:
    engine = served_by(request).engine
    try:
        record = engine.sessions.import_(SessionKey(owner_of(request), name), data)
    except StateError as error:
        raise StateFileError(str(error)) from error
    return session_answer(engine, record, 201)


@router.get("/{session_id}")
def get_session(session_id: str, request: Request) -> Response:
    """A session: its versions, what was set."""
    return session_answer(served_by(request).engine, store_of(request).get(key_of(session_id, request)))


@router.patch("/{session_id}")
def patch_session(session_id: str, body: SettingsRequest, request: Request) -> Response:
    """Change what is set of a session; fields that are left out stay."""
    record = store_of(request).configure(key_of(session_id, request), **body.changes())
    return session_answer(served_by(request).engine, record)


@router.delete("/{session_id}")
def delete_session(session_id: str, request: Request) -> Response:
    """Forget a session and all that was kept of it."""
    store_of(request).delete(key_of(session_id, request))
    return json_answer({"id": session_id, "object": "session.deleted", "deleted": True}, 200)


@router.post("/{session_id}/reset")
def reset_session(session_id: str, request: Request) -> Response:
    """Go on with an empty memory, under a new version."""
    record = store_of(request).reset(key_of(session_id, request))
    return session_answer(served_by(request).engine, record)


@router.post("/{session_id}/rollback")
def roll_session_back(session_id: str, request: Request, body: RollbackRequest | None = None) -> Response:
    """Go on with the memory of an older version, under a new one; by default the one before the last turn."""
    body = body or RollbackRequest()
    key, turns = key_of(session_id, request), body.turns_back()
    record = store_of(request).rollback(key, body.version_or_name(), turns)
    return session_answer(served_by(request).engine, record)


@router.post("/{session_id}/fork", status_code=201)
def fork_session(session_id: str, request: Request, body: ForkRequest | None = None) -> Response:
    """Make a second session that goes on from a version of this one."""
    body = body or ForkRequest()
    key = key_of(session_id, request)
    record = store_of(request).fork(key, new_name(body.id), body.version_or_name())
    return session_answer(served_by(request).engine, record, 201)


@router.get("/{session_id}/snapshots")
def list_snapshots(session_id: str, request: Request) -> Response:
    """The versions of a session that have a name."""
    record = store_of(request).get(key_of(session_id, request))
    named = [version_view(mark) for mark in record.marks if mark.name is not None]
    return list_answer(named, len(named), "name")


@router.post("/{session_id}/snapshots", status_code=201)
def create_snapshot(session_id: str, body: SnapshotRequest, request: Request) -> Response:
    """Give the head a name, under which it is kept until the name is dropped."""
    mark = store_of(request).snapshot(key_of(session_id, request), body.checked())
    return json_answer(version_view(mark), 201)


@router.delete("/{session_id}/snapshots/{name}")
def delete_snapshot(session_id: str, name: str, request: Request) -> Response:
    """Drop the name of a snapshot; its version goes when its time comes."""
    store_of(request).drop_snapshot(key_of(session_id, request), name)
    return json_answer({"name": name, "object": "session.snapshot.deleted", "deleted": True}, 200)


@router.get("/{session_id}/export")
def export_session(session_id: str, request: Request) -> Response:
    """The head as a file, which `import` takes on any server with the same model."""
    store, key = store_of(request), key_of(session_id, request)
    headers = {"content-disposition": f'attachment; filename="{session_id}.safetensors"'}
    record = store.get(key)
    return Response(store.export(key), 200, headers | version_headers(record), OCTETS)


@router.get("/{session_id}/updates")
def list_updates(
    session_id: str, request: Request, limit: Limit = 100, after: Annotated[int, Query(ge=-1, le=MAX_VERSION)] = -1
) -> Response:
    """What made each version and how much was learnt, oldest first, those above version `after`."""
    updates = store_of(request).updates(key_of(session_id, request), after, limit + 1)
    return list_answer([dataclasses.asdict(update) for update in updates], limit, "version")
