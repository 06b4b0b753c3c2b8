"""Laws of the edge: a key on every route but health, loopback names only without one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest
from engines import running_engine
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.app import create_app
from fednl_runtime.server_api.edge import host_name, is_loopback
from fednl_runtime.server_api.scopes import OPEN, ROUTES, SCOPES
from fednl_runtime.server_api.security import ApiKey, KeyRing, digest_of, key_ring
from fednl_runtime.server_api.served import Served

KEY = "a-key-of-some-length"
Serve = Callable[..., contextlib.AbstractContextManager[str]]


def own_routes(routes: Iterable[Any]) -> Iterator[str]:
    """Method and path of each route, those of included routers too."""
    for route in routes:
        if isinstance(route, Route | APIRoute):
            yield from (f"{method} {route.path}" for method in (route.methods or set()) - {"HEAD"})
        else:
            yield from own_routes(route.original_router.routes)


@pytest.fixture(name="app", scope="module")
def app_fixture(engine: Engine) -> FastAPI:
    return create_app(Served(engine, "tiny", 1)).app


def test_every_route_has_its_row_in_the_table_of_scopes(app: FastAPI) -> None:
    assert sorted(set(own_routes(app.routes)) - set(ROUTES)) == []


def test_every_route_needs_the_key_but_health(engine: Engine, serve: Serve, app: FastAPI) -> None:
    with serve(engine, keys=key_ring(KEY, None)) as address:
        for name in [*own_routes(app.routes), "GET /nothing", "POST /health", "GET /health/x"]:
            method, _, path = re.sub(r"\{.*?\}", "x", name).partition(" ")
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": ""}):
                response = httpx.request(method, address + path, headers=headers)
                if ROUTES.get(name) == OPEN:
                    assert response.status_code == 200, name
                else:
                    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), name
                assert response.headers["x-request-id"]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_opens_the_routes_of_its_scopes_and_no_others(engine: Engine, serve: Serve, scope: str) -> None:
    ring = KeyRing([ApiKey("only", frozenset([scope]), digest_of(KEY.encode()))])
    with serve(engine, keys=ring) as address:
        for name, needed in ROUTES.items():
            method, _, path = re.sub(r"\{.*?\}", "x", name).partition(" ")
            response = httpx.request(method, address + path, headers={"x-api-key": KEY})
            refused = response.status_code == 403 and response.json()["error"]["code"] == "insufficient_scope"
            assert refused == (needed not in (scope, OPEN)), name


def test_the_openai_client_gets_in_with_the_key(engine: Engine, serve: Serve) -> None:
    with serve(engine, keys=key_ring(KEY, None)) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY) as client:
            assert [m.id for m in client.models.list()] == ["tiny"]
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="other") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_without_a_key_a_foreign_host_name_is_refused(http: httpx.Client, path: str) -> None:
    response = http.get(path, headers={"host": "evil.example:8080"})
    assert (response.status_code, response.json()["error"]["code"]) == (421, "host_not_allowed")
    assert http.get(path, headers={"host": "localhost:8080"}).status_code == 200


def test_with_a_key_any_host_name_will_do(serve: Serve) -> None:
    with running_engine() as engine, serve(engine, keys=key_ring(KEY, None)) as address:
        headers = {"host": "edge.example", "authorization": f"bearer {KEY}"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost:80", "localhost"),
        ("LocalHost", "LocalHost"),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
    ],
)
def test_loopback_hosts_are_known_in_every_spelling(header: str, host: str) -> None:
    assert host_name(header) == host
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.2", "example.org", "", "127.0.0.1.example.org"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)
