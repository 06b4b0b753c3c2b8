"""Laws of the edge: a key on every route but health, loopback names only without one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import httpx
import openai
import pytest
from engines import running_engine
from fastapi.routing import APIRoute

from fednl_runtime.engine import Engine
from fednl_runtime.server_api import openai_routes, session_routes
from fednl_runtime.server_api.edge import host_name, is_loopback

KEY = "a-key-of-some-length"
ROUTES = [
    (method, re.sub(r"\{.*?\}", "x", route.path))
    for router in (openai_routes.router, session_routes.router)
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
]
Serve = Callable[..., contextlib.AbstractContextManager[str]]


def test_every_route_needs_the_key_but_health(engine: Engine, serve: Serve) -> None:
    assert len(ROUTES) == 5
    with serve(engine, api_key=KEY) as address:
        for method, path in [*ROUTES, ("GET", "/nothing"), ("POST", "/health/x")]:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                response = httpx.request(method, address + path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["x-request-id"]
        assert httpx.get(f"{address}/health").status_code == 200


def test_the_openai_client_gets_in_with_the_key(engine: Engine, serve: Serve) -> None:
    with serve(engine, api_key=KEY) as address:
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
    with running_engine() as engine, serve(engine, api_key=KEY) as address:
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
