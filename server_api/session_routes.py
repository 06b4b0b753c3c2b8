"""Routes of sessions: look at one, delete one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.server_api.openai_routes import served_by

router = APIRouter(prefix="/v1/sessions")


@router.get("/{session_id}")
async def get_session(session_id: str, request: Request) -> Response:
    """The committed version of a session."""
    session = served_by(request).engine.sessions.get(session_id)
    return JSONResponse(
        {
            "id": session.id,
            "object": "session",
            "version": session.version,
            "tokens_seen": session.tokens_seen,
            "state_bytes": session.state.nbytes,
        }
    )


@router.delete("/{session_id}")
async def delete_session(session_id: str, request: Request) -> Response:
    """Forget a session."""
    served_by(request).engine.sessions.delete(session_id)
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})
