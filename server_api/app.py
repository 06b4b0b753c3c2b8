"""The application: routes, errors and edge around one engine."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from fednl_runtime.server_api import openai_routes, session_routes
from fednl_runtime.server_api.edge import Edge
from fednl_runtime.server_api.errors import add_handlers, error_response
from fednl_runtime.server_api.openai_routes import Served

MAX_BODY_BYTES = 4 << 20


def create_app(served: Served, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> Edge:
    """The ASGI application that serves `served`; with `api_key`, all routes but /health need it."""
    app = FastAPI(title="FedNL Runtime", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.served = served
    app.include_router(openai_routes.router)
    app.include_router(session_routes.router)
    add_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.exception_handler(Exception)
    async def unexpected(request: object, error: Exception) -> Response:
        return error_response(error)

    return Edge(app, api_key, max_body_bytes)
