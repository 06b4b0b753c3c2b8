"""Laws of the log: one line an event, escaped, without what users said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from engines import until

from fednl_runtime.engine import Engine
from fednl_runtime.guard import NormCaps
from fednl_runtime.server_api.observing.logs import JsonLines, TextLines


@pytest.fixture(name="lines")
def lines_fixture() -> Iterator[io.StringIO]:
    """What the server's loggers write, as JSON lines."""
    stream, logger = io.StringIO(), logging.getLogger("fednl_runtime")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_request_is_one_line_without_its_content_its_session_or_its_key(
    http: httpx.Client, lines: io.StringIO
) -> None:
    body = {"prompt": "canary-prompt", "session_id": "canary-session", "max_tokens": 3, "seed": 1}
    headers = {"x-request-id": "my-1", "authorization": "Bearer canary-key", "user-agent": "canary-agent"}
    text = http.post("/v1/completions?canary-query=1", json=body, headers=headers).json()["choices"][0]["text"]
    http.get("/v1/sessions/canary-session")
    http.get("/canary-path\u2028")
    http.post("/v1/completions", json={**body, "temperature": "canary-value"})
    until(lambda: lines.getvalue().count("\n") == 4)  # a line is written once the answer has gone
    written = lines.getvalue()
    assert "canary" not in written
    assert not text or text not in written
    entries = [json.loads(line) for line in written.splitlines()]
    assert [entry["route"] for entry in entries] == [
        "/v1/completions",
        "/v1/sessions/{session_id}",
        "other",
        "/v1/completions",
    ]
    first = entries[0]
    assert (first["request_id"], first["status"], first["method"]) == ("my-1", 200, "POST")
    assert first["completion_tokens"] == 3
    assert first["prompt_tokens"] > 3
    assert first["ms"] > 0
    assert [entry["status"] for entry in entries] == [200, 200, 404, 400]
    assert entries[2]["code"] == "not_found"


def test_a_failure_tells_its_type_and_place_but_not_its_message(
    http: httpx.Client, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, engine: object
) -> None:
    def broken(text: str) -> None:
        raise ValueError(text)

    monkeypatch.setattr(engine.tokenizer, "encode", broken)  # type: ignore[attr-defined]
    assert http.post("/v1/completions", json={"prompt": "canary"}).status_code == 500
    until(lambda: lines.getvalue().count("\n") == 2)
    failure = json.loads(lines.getvalue().splitlines()[0])
    assert failure["error"] == "ValueError"
    assert failure["at"][-1].endswith("broken")
    assert "canary" not in lines.getvalue()


def test_a_stream_that_breaks_off_says_why_beside_its_status(
    http: httpx.Client, lines: io.StringIO, engine: Engine
) -> None:
    engine.caps = NormCaps(token=1e-9)
    body = {"prompt": "hello", "session_id": "a", "max_tokens": 3, "stream": True, "echo": True}
    assert '"code": "memory_breach"' in http.post("/v1/completions", json=body).text
    until(lambda: lines.getvalue().count("\n") == 1)
    entry = json.loads(lines.getvalue())
    assert (entry["status"], entry["code"]) == (200, "memory_breach")


def test_looks_at_health_and_metrics_are_not_told(http: httpx.Client, lines: io.StringIO) -> None:
    for path in ("/health", "/health/ready", "/metrics"):
        http.get(path)
    assert lines.getvalue() == ""


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_what_a_terminal_or_a_reader_of_lines_would_act_on_is_escaped(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "x\n\x1b[31m\u2028\x85y", (), None)
    record.fields = {"route": "a\r\nb"}
    line = formatter.format(record)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
