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
from fednl_runtime.server_api.entrance.edge import host_name, is_loopback
from fednl_runtime.server_api.entrance.scopes import OPEN, ROUTES, SCOPES
from fednl_runtime.server_api.entrance.security import ApiKey, KeyRing, digest_of, key_ring
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
    with serve(engine, keys=key_ring(KEY, None)) as address, httpx.Client(base_url=address) as client:
        for name in [*own_routes(app.routes), "GET /nothing", "POST /health", "GET /health/x"]:
            method, _, path = re.sub(r"\{.*?\}", "x", name).partition(" ")
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": ""}):
                response = client.request(method, path, headers=headers)
                if ROUTES.get(name) == OPEN:
                    assert response.status_code == 200, name
                else:
                    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), name
                assert response.headers["x-request-id"]


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_opens_the_routes_of_its_scopes_and_no_others(engine: Engine, serve: Serve, scope: str) -> None:
    ring = KeyRing([ApiKey("only", frozenset([scope]), digest_of(KEY.encode()))])
    with serve(engine, keys=ring) as address, httpx.Client(base_url=address, headers={"x-api-key": KEY}) as client:
        for name, needed in ROUTES.items():
            method, _, path = re.sub(r"\{.*?\}", "x", name).partition(" ")
            response = client.request(method, path)
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


def test_named_hosts_are_answered_and_with_keys_no_others_are(engine: Engine, serve: Serve) -> None:
    with serve(engine, keys=key_ring(KEY, None), allow_hosts=("edge.example",)) as address:
        for host, status in [("Edge.Example:443", 200), ("127.0.0.1", 200), ("evil.example", 421)]:
            assert httpx.get(f"{address}/health", headers={"host": host}).status_code == status
    with serve(engine, allow_hosts=("edge.example",)) as address:
        assert httpx.get(f"{address}/v1/models", headers={"host": "edge.example"}).status_code == 200


def test_pages_of_other_origins_get_nothing_unless_theirs_is_named(engine: Engine, serve: Serve) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with serve(engine) as address:
        response = httpx.options(f"{address}/v1/completions", headers=asks)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
    with serve(engine, keys=key_ring(KEY, None), cors_origins=("https://app.example",)) as address:
        allowed = httpx.options(f"{address}/v1/completions", headers=asks)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, asks["origin"])
        other = httpx.options(f"{address}/v1/completions", headers={**asks, "origin": "https://evil.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        refused = httpx.get(f"{address}/v1/models", headers={"origin": asks["origin"]})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, asks["origin"])
        assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_head_is_answered_as_get_is_without_the_body(http: httpx.Client, path: str) -> None:
    response = http.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0
    assert http.get(path).status_code == 200


def test_a_wrong_method_is_told_the_right_ones(http: httpx.Client) -> None:
    response = http.put("/v1/sessions/a", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "GET, PATCH, DELETE"
    assert http.get("/v1/models/").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_path_that_leads_nowhere_is_404_whatever_the_method(http: httpx.Client, method: str) -> None:
    response = http.request(method, "/v1/nothing", content=b"x")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json; charset=utf-8", 200), ("application/vnd.x+json", 200), ("text/json", 415), ("multipart", 415)],
)
def test_a_body_must_be_said_to_be_json(http: httpx.Client, kind: str, status: int) -> None:
    response = http.post("/tokenize", content=b'{"content": "a"}', headers={"content-type": kind})
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("given", ["abc-1", "a" * 128])
def test_a_harmless_request_id_is_kept(http: httpx.Client, given: str) -> None:
    assert http.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "-a", '"', "\u00e4".encode()])
def test_any_other_request_id_is_replaced(http: httpx.Client, given: str | bytes) -> None:
    assert http.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"].startswith("req_")


def test_a_key_that_asks_too_often_is_told_when_to_come_back(engine: Engine, serve: Serve) -> None:
    ring = KeyRing(ApiKey(name, frozenset(SCOPES), digest_of(name.encode())) for name in ("a", "b"))
    with serve(engine, keys=ring, rate=2) as address:
        answers = [httpx.get(f"{address}/v1/models", headers={"x-api-key": "a"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "rate_limited"
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert int(answers[2].headers["retry-after-ms"]) <= 30_000
        for path, key in [("/v1/models", "b"), ("/metrics", "a"), ("/health", "a")]:
            assert httpx.get(address + path, headers={"x-api-key": key}).status_code == 200


def test_one_key_s_session_is_not_there_for_another(engine: Engine, serve: Serve) -> None:
    ring = KeyRing(ApiKey(name, frozenset(SCOPES), digest_of(name.encode())) for name in ("a", "b"))
    with serve(engine, keys=ring) as address:
        body = {"prompt": "a", "max_tokens": 1, "session_id": "owned"}
        assert httpx.post(f"{address}/v1/completions", json=body, headers={"x-api-key": "a"}).status_code == 200
        seen = [httpx.get(f"{address}/v1/sessions/owned", headers={"x-api-key": key}).status_code for key in ("a", "b")]
        assert seen == [200, 404]


def test_a_file_may_be_larger_than_other_bodies(engine: Engine, serve: Serve) -> None:
    with serve(engine, max_body_bytes=10, max_file_bytes=100) as address:
        url, kind = f"{address}/v1/sessions/import", {"content-type": "application/octet-stream"}
        assert httpx.post(url, content=b"x" * 50, headers=kind).status_code == 400
        assert httpx.post(url, content=b"x" * 101, headers=kind).status_code == 413
        assert httpx.post(url, json={}).status_code == 415
