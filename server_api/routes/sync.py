"""Routes of the sync agent: what it does, and to have it contact, pause and go on.

Their functions touch the disk and are no coroutines: FastAPI runs them in threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from fednl_runtime.server_api.errors import SyncOffError, json_answer
from fednl_runtime.server_api.served import served_by

if TYPE_CHECKING:
    from fednl_runtime.fed_sync.device.agent import Agent

router = APIRouter(prefix="/v1/sync")


def agent_of(request: Request) -> Agent:
    """The server's agent. Raises SyncOffError."""
    agent = served_by(request).agent
    if agent is None:
        raise SyncOffError("This server takes part in no federation; start it with --sync URL.")
    return agent


@router.get("/status")
def status(request: Request) -> Response:
    """Versions, outbox, schedule and errors of the agent; nothing personal."""
    return json_answer(agent_of(request).status(), 200)


@router.post("/flush")
def flush(request: Request) -> Response:
    """Contact the endpoint now, whatever the schedule and the conditions say, unless paused."""
    agent_of(request).flush()
    return status(request)


@router.post("/pause")
def pause(request: Request) -> Response:
    """Contact and train no more, over restarts too."""
    agent_of(request).pause()
    return status(request)


@router.post("/resume")
def resume(request: Request) -> Response:
    """Go on."""
    agent_of(request).resume()
    return status(request)
