"""The OpenAPI document: FastAPI's own for what comes in, this table for what goes out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

import fednl_runtime
from fednl_runtime.server_api.entrance.scopes import OCTETS, OPEN
from fednl_runtime.server_api.entrance.scopes import ROUTES as SCOPES
from fednl_runtime.server_api.errors import json_answer
from fednl_runtime.server_api.schemas import answers, sync
from fednl_runtime.server_api.schemas import session_answers as sessions

Model: TypeAlias = type[answers.Answer]
Media: TypeAlias = Mapping[str, Model | dict[str, Any] | tuple[Model, ...]]
"""Bodies by media type: of a model, of a schema, or a stream of events of several models."""
TEXT: dict[str, Any] = {"type": "string"}
FILE: dict[str, Any] = {"type": "string", "format": "binary"}


def as_json(schema: Model | dict[str, Any]) -> Media:
    """A JSON body."""
    return {"application/json": schema}


def as_stream(whole: Model, *events: Model) -> Media:
    """A JSON body, or server-sent events; an error may end them."""
    return {"application/json": whole, "text/event-stream": (*events, answers.ErrorAnswer)}


ANSWERS: Mapping[str, tuple[int, Media]] = {
    "GET /health": (200, as_json(answers.Health)),
    "GET /health/live": (200, as_json(answers.Health)),
    "GET /health/ready": (200, as_json(answers.Health)),
    "GET /ui": (200, {"text/html": TEXT}),
    "GET /metrics": (200, {"text/plain": TEXT}),
    "GET /openapi.json": (200, as_json({"type": "object"})),
    "GET /props": (200, as_json(answers.Props)),
    "POST /tokenize": (200, as_json(answers.Tokens)),
    "POST /detokenize": (200, as_json(answers.Content)),
    "POST /apply-template": (200, as_json(answers.Prompt)),
    "GET /v1/models": (200, as_json(answers.ModelList)),
    "GET /v1/models/{name}": (200, as_json(answers.ModelObject)),
    "POST /v1/completions": (200, as_stream(answers.Completion, answers.CompletionChunk)),
    "POST /v1/chat/completions": (200, as_stream(answers.ChatCompletion, answers.ChatChunk)),
    "DELETE /v1/requests/{request_id}": (200, as_json(answers.Cancelled)),
    "GET /v1/sessions": (200, as_json(sessions.SessionPage)),
    "POST /v1/sessions": (201, as_json(sessions.SessionView)),
    "POST /v1/sessions/import": (201, as_json(sessions.SessionView)),
    "GET /v1/sessions/{session_id}": (200, as_json(sessions.SessionView)),
    "PATCH /v1/sessions/{session_id}": (200, as_json(sessions.SessionView)),
    "DELETE /v1/sessions/{session_id}": (200, as_json(sessions.SessionDeleted)),
    "POST /v1/sessions/{session_id}/reset": (200, as_json(sessions.SessionView)),
    "POST /v1/sessions/{session_id}/rollback": (200, as_json(sessions.SessionView)),
    "POST /v1/sessions/{session_id}/fork": (201, as_json(sessions.SessionView)),
    "POST /v1/sessions/{session_id}/ingest": (
        200,
        as_stream(sessions.Ingested, sessions.IngestProgress, sessions.Ingested),
    ),
    "POST /v1/sessions/{session_id}/score": (200, as_json(sessions.Scored)),
    "GET /v1/sessions/{session_id}/export": (200, {"application/octet-stream": FILE}),
    "GET /v1/sessions/{session_id}/updates": (200, as_json(sessions.UpdatePage)),
    "GET /v1/sessions/{session_id}/snapshots": (200, as_json(sessions.SnapshotPage)),
    "POST /v1/sessions/{session_id}/snapshots": (201, as_json(sessions.VersionView)),
    "DELETE /v1/sessions/{session_id}/snapshots/{name}": (200, as_json(sessions.SnapshotDeleted)),
    "GET /v1/sync/status": (200, as_json(sync.SyncStatus)),
    "POST /v1/sync/flush": (200, as_json(sync.SyncStatus)),
    "POST /v1/sync/pause": (200, as_json(sync.SyncStatus)),
    "POST /v1/sync/resume": (200, as_json(sync.SyncStatus)),
}
"""Status and bodies of each route that does what it is asked. Whoever adds a route adds it here."""

ERRORS: Mapping[int, str] = {
    400: "The body or a parameter is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The API key is not good for this.",
    404: "There is no such model, session, version or request.",
    409: "The session is busy, at another version, or there already; the request was cancelled; or nothing syncs.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    421: "The server does not answer to this host name.",
    429: "Too many requests, or no room for another session.",
    500: "The server failed; the session is as it was.",
    503: "The server is stopping, or cannot store sessions.",
}

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """This document."""
    return json_answer(document(request.app), 200)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    told = get_openapi(
        title="FedNL Runtime",
        version=fednl_runtime.__version__,
        summary="Language models that learn while they run.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        routes=app.routes,
    )
    for name, operation in operations(told):
        if name in OCTETS:
            operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": FILE}}}
        operation["responses"] = responses(name, operation)
        if SCOPES.get(name) != OPEN:
            operation["security"] = [{"bearer": []}, {"header": []}]
    components = told["components"]
    components["schemas"] |= answer_schemas()
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "Needed where the server has keys."},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    return told


def operations(told: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The operations of a document, each by method and path."""
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def responses(name: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    """What an operation may answer, by status."""
    status, media = ANSWERS[name]
    content = {
        kind: {"itemSchema": event(body)} if isinstance(body, tuple) else {"schema": reference(body)}
        for kind, body in media.items()
    }
    failed = {"application/json": {"schema": reference(answers.ErrorAnswer)}}
    errors = {str(code): {"description": ERRORS[code], "content": failed} for code in errors_of(name, operation)}
    return {str(status): {"description": "Done.", "content": content}, **errors}


def errors_of(name: str, operation: Mapping[str, Any]) -> list[int]:
    """The errors that an operation can end in."""
    codes = {421, 500}
    if name == "GET /health/ready":
        codes |= {503}
    if SCOPES.get(name) != OPEN:
        codes |= {401, 403, 429, 503}
    if "requestBody" in operation:
        codes |= {400, 413, 415}
    if "parameters" in operation:
        codes |= {400, 404}
    if "{session_id}" in name or name.startswith(("POST /v1", "DELETE /v1", "GET /v1/sync")):
        codes |= {404, 409}
    return sorted(codes)


def reference(schema: Model | dict[str, Any]) -> dict[str, Any]:
    """A schema as it stands in the document."""
    return schema if isinstance(schema, dict) else {"$ref": answers.REFERENCE.format(model=schema.__name__)}


def event(models: Iterable[Model]) -> dict[str, Any]:
    """The schema of a server-sent event whose data are JSON of one of `models`, or [DONE]."""
    content = {"anyOf": [reference(model) for model in models]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}


def answer_schemas() -> dict[str, Any]:
    """The schemas of all answers, by name."""
    bodies = [body for _, media in ANSWERS.values() for body in media.values()]
    used = [model for body in bodies for model in (body if isinstance(body, tuple) else (body,))]
    return answers.definitions(model for model in used if not isinstance(model, dict))
