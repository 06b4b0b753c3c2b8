"""The aggregation endpoint: its routes, its clock, and what every answer carries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fednl_runtime.errors import FednlError
from fednl_runtime.fed_sync.fleet import rounds
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.problems import problem_of
from fednl_runtime.fed_sync.fleet.resources import Resources

TICK_S = 1.0
"""Seconds between two looks at the open round."""
CLEAN_S = 3600.0
"""Seconds between two searches for leftovers."""
ROUTES = [
    ("GET", "/health", "health"),
    ("GET", "/metrics", "metrics"),
    ("POST", "/v1/devices", "enrol"),
    ("PUT", "/v1/devices/self/key", "rotate"),
    ("POST", "/v1/populations/{population}/check-in", "check_in"),
    ("GET", "/v1/populations/{population}/rules/current", "current"),
    ("GET", "/v1/populations/{population}/rules/{version}", "rules"),
    ("PUT", "/v1/populations/{population}/updates/{update_id}", "put_update"),
    ("GET", "/v1/populations/{population}/updates/{update_id}", "get_update"),
    ("GET", "/v1/populations/{population}/rounds", "rounds"),
    ("GET", "/v1/admin/populations/{population}", "status"),
    ("POST", "/v1/admin/populations/{population}/{action}", "act"),
    ("POST", "/v1/admin/devices/{device_id}/revoke", "revoke"),
]
"""Method and path of every route, and the name of what answers it."""


def create_app(fleet: Fleet, admin_token: str | None = None, public_url: str | None = None) -> Paced:
    """The ASGI application of a fleet that was founded.

    Without `admin_token` nobody is the operator over HTTP. `public_url` is the address that devices use, where a
    proxy stands between.
    """
    resources = Resources(fleet, admin_token, public_url)

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch(resources))
        yield
        task.cancel()

    app = FastAPI(title="FedNL aggregation", docs_url=None, redoc_url=None, openapi_url=None, lifespan=running)
    for method, path, answer in ROUTES:
        app.add_api_route(path, getattr(resources, answer), methods=[method])

    async def failed(request: Request, error: Exception) -> Response:
        return problem_of(error, resources.pace)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    for kind in (FednlError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(ClientDisconnect, gone)
    return Paced(app, resources)


async def watch(resources: Resources) -> None:
    """Close rounds at their time and clean up, until cancelled."""
    cleaned = -CLEAN_S
    while True:
        await run_in_threadpool(rounds.tick_safely, resources.fleet)
        with contextlib.suppress(FednlError, OSError):
            resources.pace = await run_in_threadpool(resources.look)
            if time.monotonic() - cleaned > CLEAN_S:
                await run_in_threadpool(rounds.clean, resources.fleet)
                cleaned = time.monotonic()
        await asyncio.sleep(TICK_S)


class Paced:
    """Puts the time to come again on every answer, and counts them."""

    def __init__(self, app: ASGIApp, resources: Resources) -> None:
        self.app = app
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499

        async def send_paced(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, pace = message["status"], self._resources.pace
                MutableHeaders(scope=message)["next-sync"] = f"{pace['min_s']}, {pace['max_s']}"
            await send(message)

        try:
            await self.app(scope, receive, send_paced)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._resources.traffic.note(route, status, time.perf_counter() - started)
