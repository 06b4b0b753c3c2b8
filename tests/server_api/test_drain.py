"""Laws of stopping: no new work, time for what runs, then an end that is told and leaves no trace."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import write_certificate
from engines import ENDLESS, running_engine, until, write_tiny_model
from timing import within

from fednl_runtime.engine import Engine
from fednl_runtime.errors import SessionNotFoundError
from fednl_runtime.server_api.app import create_app
from fednl_runtime.server_api.commands.serve import listen
from fednl_runtime.server_api.entrance.drain import DrainingServer
from fednl_runtime.server_api.served import Served
from fednl_runtime.session import SessionKey

PROGRAM = [sys.executable, "-m", "fednl_runtime.server_api"]


class Running:
    """A server in a thread, which gets its signals by hand, and one streamed request that runs on it."""

    def __init__(self, engine: Engine, drain_s: float, address: str, server: DrainingServer) -> None:
        self.engine, self.address, self.server = engine, address, server
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._stream)

    def signal(self) -> None:
        """What SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)

    def _stream(self) -> None:
        body = {"prompt": "a", "max_tokens": 100, "session_id": "s", "stream": True, **ENDLESS}
        with httpx.stream("POST", f"{self.address}/v1/completions", json=body, timeout=60) as response:
            self.lines.extend(response.iter_lines())

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """A request whose stream has begun; it has ended when the block has."""
        self._thread.start()
        until(lambda: self.lines)
        yield
        self._thread.join(60)


@contextlib.contextmanager
def draining_server(drain_s: float, delay_s: float = 0.01) -> Iterator[Running]:
    """A server that has stopped when the block ends."""
    with running_engine() as engine, listen("127.0.0.1", 0) as sock:
        engine.backend.delay_s = delay_s
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = DrainingServer(create_app(Served(engine, "tiny", 1)), drain_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        until(lambda: server.started)
        yield Running(engine, drain_s, address, server)
        thread.join(60)
        assert not thread.is_alive()


def test_a_draining_server_lets_its_requests_end_and_takes_no_more() -> None:
    with draining_server(drain_s=30) as running:
        with running.streaming():
            running.signal()
            ready = httpx.get(f"{running.address}/health/ready")
            refused = httpx.post(f"{running.address}/v1/completions", json={"prompt": "a"})
            assert httpx.get(f"{running.address}/health/live").status_code == 200
            metrics = httpx.get(f"{running.address}/metrics").text
        for response in (ready, refused):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            assert response.headers["retry-after"]
            assert response.headers["retry-after-ms"]
        assert 'requests_rejected_total{reason="shutting_down"} 1.0' in metrics
        assert running.lines[-2:] == ["data: [DONE]", ""]
        assert running.engine.sessions.get(SessionKey("", "s")).head.version == 1


@pytest.mark.parametrize("signals", [1, 2])
def test_what_runs_too_long_or_is_not_to_be_waited_for_is_rolled_back_and_told(signals: int) -> None:
    with within(3), draining_server(drain_s=0.3 if signals == 1 else 60, delay_s=0.1) as running:
        with running.streaming():
            for _ in range(signals):
                running.signal()
        assert '"code": "shutting_down"' in running.lines[-2]
        assert "data: [DONE]" not in running.lines
        with pytest.raises(SessionNotFoundError):
            running.engine.sessions.get(SessionKey("", "s"))


def test_an_idle_connection_is_kept_for_longer_than_clients_keep_it() -> None:
    with draining_server(drain_s=0) as running:
        assert running.server.config.timeout_keep_alive > 60
        running.signal()


def test_a_server_without_work_stops_at_once() -> None:
    with within(1.5), draining_server(drain_s=60) as running:
        running.signal()


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


@contextlib.contextmanager
def process(model: Path, *args: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    command = [*PROGRAM, "serve", str(model), "--port", "0", "--threads", "1", "--in-memory", *args]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as server:
        assert server.stderr
        found = (re.search(r"(?:curl -N |\"url\": \")(https?://[^/]+:\d+)", line) for line in server.stderr)
        try:
            yield server, next(address[1] for address in found if address)
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_told_to_stop_ends_its_stream_first(model: Path, number: int) -> None:
    body = {"prompt": "a", "max_tokens": 400, "stream": True, **ENDLESS}
    with process(model, "--log-format", "json") as (server, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(number)
            assert [*lines][-2:] == ["data: [DONE]", ""]
        assert server.wait(20) == 0
        assert server.stderr
        assert "Traceback" not in server.stderr.read()


def test_https_is_served_with_a_certificate_and_its_key(model: Path, tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    with process(model, "--tls-cert", str(cert), "--tls-key", str(key)) as (_, address):
        assert address.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        assert httpx.get(f"{address}/health/ready", verify=context).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{address}/health/ready")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address.replace('https', 'http')}/health/ready")


def test_all_addresses_are_told_as_one_that_can_be_used(model: Path) -> None:
    env = {**os.environ, "FEDNL_API_KEY": "secret"}
    with process(model, "--host", "0.0.0.0", env=env) as (_, address):
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(f"{address}/v1/models", headers={"x-api-key": "secret"}).status_code == 200


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["fednl-runtime", "serve", {model!r}, "--port", "0", "--in-memory"]
from fednl_runtime.server_api.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["click", "numpy", "onnxruntime", "fastapi", "prometheus_client", "uvicorn"])
def test_an_interrupt_while_modules_load_prints_no_traceback(model: Path, name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name, model=str(model))
    result = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "")
