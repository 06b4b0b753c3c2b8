"""Routes for whoever operates the server: is it alive, does it take work, what does it count."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from fednl_runtime.errors import ShuttingDownError
from fednl_runtime.server_api.entrance.gate import Gate
from fednl_runtime.server_api.observing.metrics import Meters

router = APIRouter()


@router.get("/health")
@router.get("/health/live")
async def live() -> Response:
    """The server answers."""
    return JSONResponse({"status": "ok"})


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """The server takes work; 503 once it is to stop."""
    gate: Gate = request.app.state.gate
    if gate.closed:
        raise ShuttingDownError("The server is stopping and takes no more work.")
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """What the server counts, in Prometheus' text format."""
    meters: Meters = request.app.state.meters
    return Response(meters.exposition(), media_type=CONTENT_TYPE_LATEST)
