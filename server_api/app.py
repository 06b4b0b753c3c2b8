"""The application: routes, errors and edge around one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import Response

from fednl_runtime.server_api import openapi
from fednl_runtime.server_api.answering.running import RunningRequests
from fednl_runtime.server_api.entrance.edge import Edge, EdgeOptions
from fednl_runtime.server_api.entrance.gate import Gate
from fednl_runtime.server_api.errors import add_handlers, error_response
from fednl_runtime.server_api.observing.metrics import Meters
from fednl_runtime.server_api.routes import openai as openai_routes
from fednl_runtime.server_api.routes import operations as ops_routes
from fednl_runtime.server_api.routes import reading as reading_routes
from fednl_runtime.server_api.routes import requests as request_routes
from fednl_runtime.server_api.routes import sessions as session_routes
from fednl_runtime.server_api.routes import sync as sync_routes
from fednl_runtime.server_api.routes import tools as tool_routes
from fednl_runtime.server_api.served import Served
from fednl_runtime.server_api.sweeper import sweeping
from fednl_runtime.server_api.ui import page as ui

ROUTES = (
    openai_routes,
    session_routes,
    reading_routes,
    request_routes,
    tool_routes,
    ops_routes,
    sync_routes,
    openapi,
    ui,
)
"""The modules whose routes the server has."""


def create_app(served: Served, options: EdgeOptions | None = None) -> Edge:
    """The ASGI application that serves `served` to those whom `options` let in."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with sweeping(served.engine.sessions):
            yield

    app = FastAPI(
        title="FedNL Runtime",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    gate, meters = Gate(), Meters(served)
    app.state.served, app.state.running = served, RunningRequests()
    app.state.gate, app.state.meters = gate, meters
    for routes in ROUTES:
        app.include_router(routes.router)
    add_handlers(app)

    @app.exception_handler(Exception)
    async def unexpected(request: object, error: Exception) -> Response:
        return error_response(error)

    return Edge(app, options or EdgeOptions(), gate, meters)
