"""Laws of the socket: who is slow to send or to read is let go, and what is no HTTP is told so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from engines import ENDLESS, running_engine, until
from starlette.types import Receive, Scope, Send

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.entrance.transport import Http11

Serve = Callable[..., contextlib.AbstractContextManager[str]]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(address: str) -> socket.socket:
    url = urlsplit(address)
    return socket.create_connection((url.hostname, url.port), timeout=30)


def post(sock: socket.socket, **body: object) -> None:
    data = json.dumps(body).encode()
    sock.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)


@pytest.mark.parametrize("sent", ["", "POST /v1/comp", f"{HEAD}Content-Length: 100\r\n\r\n{{"])
def test_a_request_that_does_not_come_whole_is_not_waited_for(
    engine: Engine, serve: Serve, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http11, "arrival_s", 0.2)
    with serve(engine) as address, connect(address) as sock:
        sock.sendall(sent.encode())
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1000) == b""


def test_a_request_that_drips_in_is_not_waited_for_either(
    engine: Engine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http11, "arrival_s", 0.3)
    with serve(engine) as address, connect(address) as sock:
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD.encode() * 10:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - begin < 10


def test_an_answer_may_take_longer_than_a_request(
    engine: Engine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http11, "arrival_s", 0.2)
    with running_engine() as slow, serve(slow) as address, connect(address) as sock:
        slow.backend.delay_s = 0.1
        for _ in range(2):  # on one connection, which is kept
            post(sock, prompt="a", max_tokens=5, **ENDLESS)
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
            until(lambda: sock.recv(65536).endswith(b"}"))


def test_a_client_that_does_not_read_is_seen_to_leave(serve_app: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http11, "stall_s", 0.3)
    left = threading.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        watch = asyncio.create_task(until_gone())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.is_set():
            await send({"type": "http.response.body", "body": b"a" * 100_000, "more_body": True})
            await asyncio.sleep(0)
        await watch

    with serve_app(endless) as address, connect(address) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(1)
        assert left.wait(20)


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /" + b"a" * 70_000,
    ],
)
def test_what_is_no_http_is_answered_in_the_shape_of_all_errors(engine: Engine, serve: Serve, sent: bytes) -> None:
    with serve(engine) as address, connect(address) as sock:
        sock.sendall(sent + b"\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert list(json.loads(body)["error"]) == ["message", "type", "param", "code"]
