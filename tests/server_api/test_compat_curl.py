"""curl against a running server: the raw bytes of a stream, and what killing curl leaves behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from engines import ENDLESS, committed, running_engine, until

from fednl_runtime.engine import Engine

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
Serve = Callable[..., contextlib.AbstractContextManager[str]]
HELLO = [{"role": "user", "content": "hello"}]


def curl(address: str, path: str = "/v1/chat/completions", **body: Any) -> subprocess.Popen[bytes]:
    """curl -N that asks for a stream."""
    data = json.dumps({"messages": HELLO, "stream": True, **ENDLESS, **body})
    command = ["curl", "-sN", "-D", "/dev/stderr", address + path, "-H", "content-type: application/json", "-d", data]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_stream_is_events_of_one_line_each_and_done_at_last(address: str) -> None:
    told, head = curl(address, max_tokens=5).communicate(timeout=60)
    *events, done, rest = told.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") and b"\n" not in event and event.isascii() for event in events)
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-store" in head


def test_silence_is_kept_alive_by_comments(serve: Serve) -> None:
    with running_engine() as engine, serve(engine, keep_alive_s=0.02) as address:
        engine.backend.delay_s = 0.1
        told, _ = curl(address, max_tokens=2).communicate(timeout=60)
    assert b": keep-alive\n\n" in told
    assert told.endswith(b"data: [DONE]\n\n")


def test_killing_curl_leaves_the_session_at_its_version(address: str, http: httpx.Client, engine: Engine) -> None:
    body = {"messages": HELLO, "session_id": "killed", "max_tokens": 2}
    http.post("/v1/chat/completions", json=body)
    before = committed(engine, "killed")
    engine.backend.delay_s = 0.005
    with curl(address, session_id="killed", max_tokens=1900) as process:
        assert process.stdout
        assert process.stdout.readline().startswith(b"data: {")
        process.kill()
    until(lambda: not engine.scheduler._keys)
    assert committed(engine, "killed").state is before.state
