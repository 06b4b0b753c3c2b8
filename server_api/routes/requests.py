"""Routes of requests that run: stop one."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.server_api.answering.running import RunningRequests
from fednl_runtime.server_api.served import owner_of

router = APIRouter(prefix="/v1/requests")


@router.delete("/{request_id}")
async def cancel_request(request_id: str, request: Request) -> Response:
    """Stop a request of the caller's own by its x-request-id; its turn is rolled back."""
    running: RunningRequests = request.app.state.running
    running.cancel(owner_of(request), request_id)
    return JSONResponse({"id": request_id, "object": "request.cancelled", "cancelled": True})
