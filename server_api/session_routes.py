"""Routes of sessions: look at one, delete one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.server_api.served import owner_of, served_by
from fednl_runtime.session import SessionKey

router = APIRouter(prefix="/v1/sessions")


@router.get("/{session_id}")
async def get_session(session_id: str, request: Request) -> Response:
    """The committed version of a session."""
    engine = served_by(request).engine
    record = engine.sessions.get(SessionKey(owner_of(request), session_id))
    return JSONResponse(
        {
            "id": record.key.id,
            "object": "session",
            "version": record.head.version,
            "tokens_seen": record.head.tokens_seen,
            "state_bytes": engine.state_bytes,
        }
    )


@router.delete("/{session_id}")
async def delete_session(session_id: str, request: Request) -> Response:
    """Forget a session."""
    served_by(request).engine.sessions.delete(SessionKey(owner_of(request), session_id))
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})
