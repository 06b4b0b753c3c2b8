"""What each route asks of its caller: the one table of scopes. A route that is not in it cannot be reached."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from starlette.routing import compile_path

OPEN = "open"
"""The scope of routes that need no key."""
INFER, SESSIONS, ADMIN, METRICS = SCOPES = ("infer", "sessions", "admin", "metrics")
"""What a key may be good for."""

ROUTES: Mapping[str, str] = {
    "GET /health": OPEN,
    "GET /health/live": OPEN,
    "GET /health/ready": OPEN,
    "GET /ui": OPEN,
    "GET /metrics": METRICS,
    "GET /openapi.json": INFER,
    "GET /props": INFER,
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "POST /apply-template": INFER,
    "GET /v1/models": INFER,
    "GET /v1/models/{name:path}": INFER,
    "POST /v1/completions": INFER,
    "POST /v1/chat/completions": INFER,
    "DELETE /v1/requests/{request_id}": INFER,
    "GET /v1/sessions": SESSIONS,
    "POST /v1/sessions": SESSIONS,
    "POST /v1/sessions/import": SESSIONS,
    "GET /v1/sessions/{session_id}": SESSIONS,
    "PATCH /v1/sessions/{session_id}": SESSIONS,
    "DELETE /v1/sessions/{session_id}": SESSIONS,
    "POST /v1/sessions/{session_id}/reset": SESSIONS,
    "POST /v1/sessions/{session_id}/fork": SESSIONS,
    "POST /v1/sessions/{session_id}/rollback": SESSIONS,
    "POST /v1/sessions/{session_id}/ingest": SESSIONS,
    "POST /v1/sessions/{session_id}/score": SESSIONS,
    "GET /v1/sessions/{session_id}/export": SESSIONS,
    "GET /v1/sessions/{session_id}/updates": SESSIONS,
    "GET /v1/sessions/{session_id}/snapshots": SESSIONS,
    "POST /v1/sessions/{session_id}/snapshots": SESSIONS,
    "DELETE /v1/sessions/{session_id}/snapshots/{name}": SESSIONS,
    "GET /v1/sync/status": ADMIN,
    "POST /v1/sync/flush": ADMIN,
    "POST /v1/sync/pause": ADMIN,
    "POST /v1/sync/resume": ADMIN,
}
"""Scope by method and path. Whoever adds a route adds it here, and to docs/http.md."""

OCTETS = ("POST /v1/sessions/import",)
"""Routes whose body is a file; that of all others is JSON."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row of the table."""

    method: str
    template: str
    scope: str
    octets: bool
    pattern: re.Pattern[str]


@dataclasses.dataclass(frozen=True)
class Found:
    """The rule for a method and path, None if there is none; the methods that the path knows."""

    rule: Rule | None
    methods: tuple[str, ...]


class RouteTable:
    """The table, made ready to be searched by path."""

    def __init__(self, routes: Mapping[str, str] = ROUTES) -> None:
        self._rules = [_rule(name, scope) for name, scope in routes.items()]

    def find(self, method: str, path: str) -> Found:
        """What the table says of a request."""
        rules = [rule for rule in self._rules if rule.pattern.match(path)]
        fitting = [rule for rule in rules if rule.method == method]
        return Found(fitting[0] if fitting else None, tuple(dict.fromkeys(rule.method for rule in rules)))


def _rule(name: str, scope: str) -> Rule:
    method, _, path = name.partition(" ")
    return Rule(method, path.replace(":path", ""), scope, name in OCTETS, compile_path(path)[0])
