"""A real server on a real socket, with the tiny model behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from engines import running_engine
from starlette.types import ASGIApp

from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.server_api.app import create_app
from fednl_runtime.server_api.commands.serve import listen
from fednl_runtime.server_api.entrance.edge import EdgeOptions
from fednl_runtime.server_api.entrance.transport import Http11
from fednl_runtime.server_api.served import Served

LIMITS = EngineLimits(slots=2, queue=2, busy_wait_s=0.2, max_prompt_tokens=500, max_tokens=2000)


def serving(
    engine: Engine, keep_alive_s: float = 15.0, agent: Any = None, **options: Any
) -> contextlib.AbstractContextManager[str]:
    """The address of a server around `engine`."""
    served = Served(engine, "tiny", 1_700_000_000, keep_alive_s, agent=agent)
    return serving_app(create_app(served, EdgeOptions(**options)))


@contextlib.contextmanager
def serving_app(app: ASGIApp) -> Iterator[str]:
    """The address of a server around an application."""
    server = uvicorn.Server(
        uvicorn.Config(app, http=Http11, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    )
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)


@pytest.fixture(name="serve", scope="session")
def serve_fixture() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Starts a server around an engine of the test's own."""
    return serving


@pytest.fixture(name="serve_app")
def serve_app_fixture() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """Starts a server around an application of the test's own."""
    return serving_app


@pytest.fixture(name="engine", scope="module")
def engine_fixture() -> Iterator[Engine]:
    with running_engine(LIMITS) as engine:
        yield engine


@pytest.fixture(name="address", scope="module")
def address_fixture(engine: Engine) -> Iterator[str]:
    with serving(engine, max_body_bytes=20_000) as address:
        yield address


@pytest.fixture(name="http")
def http_fixture(address: str, engine: Engine) -> Iterator[httpx.Client]:
    engine.backend.delay_s, engine.backend.fail_at = 0.0, None
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture(name="client")
def client_fixture(http: httpx.Client, address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client
