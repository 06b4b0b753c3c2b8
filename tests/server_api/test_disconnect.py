"""Laws of disconnects, on real sockets: the turn stops, the session is as it was."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from engines import ENDLESS, committed, running_engine, until
from timing import within

from fednl_runtime.engine import Engine
from fednl_runtime.errors import SessionNotFoundError

Serve = Callable[..., contextlib.AbstractContextManager[str]]


def post(address: str, **body: object) -> socket.socket:
    """A socket on which a completion was asked for."""
    url = urlsplit(address)
    assert url.hostname
    assert url.port
    data = json.dumps({**ENDLESS, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((url.hostname, url.port), timeout=60)
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def wait_idle(engine: Engine) -> int:
    """Wait until no turn runs; return the number of calls the model has had."""
    until(lambda: not (engine.scheduler._active or engine.scheduler._keys))
    return len(engine.backend.calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_rolls_its_turn_back(
    http: httpx.Client, address: str, engine: Engine, stream: bool
) -> None:
    name = f"left-{stream}"
    http.post("/v1/completions", json={"prompt": "abc", "session_id": name})
    before = committed(engine, name)
    engine.backend.delay_s = 0.005
    calls = len(engine.backend.calls)
    sock = post(address, prompt="abc", session_id=name, stream=stream, max_tokens=1500)
    until(lambda: len(engine.backend.calls) >= calls + 5)
    sock.close()
    assert wait_idle(engine) < calls + 500
    assert committed(engine, name).state is before.state
    engine.backend.delay_s = 0.0
    response = http.post("/v1/completions", json={"prompt": "abc", "session_id": name})
    assert response.json()["session"]["version"] == 2


def test_nothing_more_is_sent_to_a_client_that_left(
    address: str, http: httpx.Client, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        sock = post(address, prompt="abc", stream=True, max_tokens=400)
        assert sock.recv(10)
        sock.close()
        wait_idle(engine)
    http.get("/health")
    assert "socket.send() raised" not in caplog.text


def test_a_client_that_leaves_during_a_long_prompt_stops_it(address: str, http: httpx.Client, engine: Engine) -> None:
    engine.backend.delay_s = 0.02
    calls = len(engine.backend.calls)
    sock = post(address, prompt=[1] * 490, session_id="long", max_tokens=1)
    until(lambda: len(engine.backend.calls) >= calls + 2)
    sock.close()
    assert wait_idle(engine) < calls + 30
    with pytest.raises(SessionNotFoundError):
        committed(engine, "long")


def test_a_client_that_leaves_while_it_waits_is_forgotten(address: str, http: httpx.Client, engine: Engine) -> None:
    engine.backend.delay_s = 0.005
    first = post(address, prompt="abc", session_id="w", max_tokens=1500)
    until(lambda: engine.scheduler._keys)
    second = post(address, prompt="abc", session_id="w", max_tokens=1)
    until(lambda: engine.scheduler._waiting)
    second.close()
    first.close()
    wait_idle(engine)
    with pytest.raises(SessionNotFoundError):
        committed(engine, "w")


def test_silence_is_kept_alive_by_comments(serve: Serve) -> None:
    with running_engine() as engine, serve(engine, keep_alive_s=0.02) as address:
        engine.backend.delay_s = 0.1
        body = {"prompt": "ab", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
        assert ": keep-alive" in lines
        assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_shows_a_stream_as_it_comes(address: str, http: httpx.Client, engine: Engine) -> None:
    engine.backend.delay_s = 0.02
    body = json.dumps({"prompt": "abc", "max_tokens": 40, "stream": True, **ENDLESS})
    command = ["curl", "-sN", f"{address}/v1/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
        assert curl.stdout
        assert curl.stdout.readline().startswith(b"data: {")
        first = time.monotonic()
        rest = curl.stdout.read()
        assert time.monotonic() - first > 0.1
    assert rest.endswith(b"data: [DONE]\n\n")
    assert curl.returncode == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stopping_server_cuts_short_is_told_so(serve: Serve, stream: bool) -> None:
    with running_engine() as engine:
        engine.backend.delay_s = 0.01
        with serve(engine) as address:
            sock = post(address, prompt="abc", session_id="a", stream=stream, max_tokens=2000, **ENDLESS)
            until(lambda: engine.backend.calls)
        with sock, sock.makefile("rb") as answer:
            assert b'"code": "shutting_down"' in answer.read().split(b"data: ")[-1]
        with pytest.raises(SessionNotFoundError):
            committed(engine, "a")


def test_a_stopping_server_does_not_wait_for_an_open_stream(serve: Serve) -> None:
    with running_engine() as engine:
        engine.backend.delay_s = 0.01
        with serve(engine) as address:
            sock = post(address, prompt="abc", session_id="a", stream=True, max_tokens=2000)
            sock.recv(10)
        with within(2):
            wait_idle(engine)
        sock.close()
        with pytest.raises(SessionNotFoundError):
            committed(engine, "a")
