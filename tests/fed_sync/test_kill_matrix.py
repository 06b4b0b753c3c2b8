"""An endpoint killed at any commit point publishes, once restarted, the very bytes of one that never died."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from engines import until
from fleets import Caller
from updates import RULES, SCHEMA, body_of, update_of

from fednl_runtime.crash import VARIABLE
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.update import new_update_id
from fednl_runtime.server_api.commands.aggregator import fleet_at

PROGRAM = Path(sys.executable).with_name("fednl-runtime")
POINTS = (
    "update.before_blob",
    "update.after_blob",
    "update.before_commit",
    "update.after_commit",
    "close.before_blob",
    "close.after_blob",
    "close.before_commit",
    "close.after_commit",
)
CLIENTS, ROUNDS = 5, 3
IDS = [[new_update_id(time.time() + version) for _ in range(CLIENTS)] for version in range(ROUNDS)]
"""The same in every run, as an outbox keeps them."""


class Server:
    """A real endpoint process that is started again where it died."""

    def __init__(self, folder: Path, database: str | None, point: str | None) -> None:
        self.folder, self.database = folder, database
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.deaths = 0
        self.start(point)

    def options(self) -> list[str]:
        database = ["--database", self.database] if self.database else []
        return ["--state-dir", str(self.folder / "state"), "--population", "p", *database]

    def start(self, point: str | None) -> None:
        rules = ["--rules", str(self.folder / "rules.safetensors"), "--port", str(self.port)]
        rounds = ["--goal", str(CLIENTS), "--optimizer", "momentum", "--deadline", "100000"]
        command = [PROGRAM, "aggregator", "serve", *self.options(), *rules, *rounds]
        environment = {**os.environ, **({VARIABLE: point} if point else {})}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "Devices pin" in line:
                return
        raise AssertionError(f"the endpoint did not start: {self.process.wait()}")

    def mend(self) -> None:
        """Start again, this time to live."""
        if self.process.wait(timeout=30) == -9:
            self.deaths += 1
        self.process.stderr.close()
        self.start(None)

    def tokens(self) -> list[str]:
        """Made beside the running endpoint, as `aggregator token` makes them."""
        fleet = fleet_at(self.folder / "state", self.database, "p")
        try:
            return [intake.new_token(fleet) for _ in range(CLIENTS)]
        finally:
            fleet.repository.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.process.stderr.close()


def insist(server: Server, call) -> httpx.Response:
    """Call until there is an answer, as an agent does."""
    while True:
        try:
            answer = call()
        except httpx.TransportError:
            server.mend()
            continue
        assert answer.status_code < 500
        return answer


def play(server: Server) -> list[str]:
    """Three rounds of five devices; the SHA-256 of every published version."""
    callers = [Caller(f"http://127.0.0.1:{server.port}", number, time.time) for number in range(1, CLIENTS + 1)]
    for caller, token in zip(callers, server.tokens(), strict=True):
        assert insist(server, lambda c=caller, token=token: c.enrol(token)).status_code == 201
    for version in range(ROUNDS):
        for number, caller in enumerate(callers):
            update = update_of(100 * version + number, base_version=version + 1, num_tokens=100 + number)
            name, body = IDS[version][number], body_of(update)
            answer = insist(server, lambda c=caller, name=name, body=body: c.put(name, body))
            assert answer.status_code in (200, 201), answer.text

        def published(want: int = version + 2) -> bool:
            told = insist(server, lambda: callers[0].get("rounds")).json()
            return told["current_version"] == want

        until(published)
    found = insist(server, lambda: callers[0].get("rounds")).json()["versions"]
    for name in (name for row in IDS for name in row):
        number = next(i for row in IDS for i, known in enumerate(row) if known == name)
        assert (
            insist(server, lambda n=number, name=name: callers[n].get(f"updates/{name}")).json()["status"] == "counted"
        )
    for caller in callers:
        caller.http.close()
    assert [version["members"] for version in found] == [CLIENTS] * ROUNDS + [0]
    return [version["sha256"] for version in found]


def run(folder: Path, database: str | None, point: str | None) -> tuple[list[str], int]:
    """Digests of all versions, and how often the endpoint died."""
    RULES.save(folder / "rules.safetensors")
    server = Server(folder, database, point)
    try:
        return play(server), server.deaths
    finally:
        server.stop()


def binaries() -> Path | None:
    """The folder of Postgres' programs, if it is installed."""
    found = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    return found[-1] if found else None


@pytest.fixture(name="postgres", scope="module")
def postgres_fixture() -> Iterator[str]:
    """The URL of a server of its own, on a socket in a folder of its own; Postgres refuses to run as root."""
    programs = binaries()
    if programs is None:
        pytest.skip("needs the Debian package postgresql")
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="fednl-pg-"))
    if user:
        shutil.chown(folder, user)
    options = {"user": user, "cwd": folder, "capture_output": True, "check": True}
    subprocess.run([programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "fleet", "-E", "UTF8"], **options)
    command = [programs / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
    server = subprocess.Popen(command, user=user, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list(folder.glob(".s.PGSQL.*")))
        time.sleep(0.5)
        yield f"postgresql+psycopg://fleet@/{{}}?host={folder}"
    finally:
        server.send_signal(signal.SIGQUIT)  # at once: nobody needs its data any more
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def new_database(postgres: str, name: str) -> str:
    """The URL of an empty database."""
    import psycopg

    with psycopg.connect(postgres.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return postgres.format(name)


@pytest.fixture(name="undisturbed", scope="module")
def undisturbed_fixture(tmp_path_factory) -> list[str]:
    """The digests of a run without a death."""
    digests, deaths = run(tmp_path_factory.mktemp("undisturbed"), None, None)
    assert deaths == 0
    assert len(set(digests)) == ROUNDS + 1
    return digests


@pytest.mark.parametrize("point", POINTS)
def test_on_sqlite_a_kill_changes_no_published_byte(tmp_path, undisturbed, point):
    assert run(tmp_path, None, point) == (undisturbed, 1)


@pytest.mark.parametrize("point", [None, *POINTS])
def test_on_postgres_a_kill_changes_no_published_byte(tmp_path, postgres, undisturbed, point):
    database = new_database(postgres, (point or "none").replace(".", "_"))
    assert run(tmp_path, database, point) == (undisturbed, 0 if point is None else 1)


def test_every_crash_point_of_the_code_is_in_the_matrix():
    text = "".join(path.read_text() for path in (Path(__file__).parents[2] / "fed_sync").rglob("*.py"))
    assert set(re.findall(r'crash_point\("((?:update|close)\.\w+)"\)', text)) == set(POINTS)
    assert SCHEMA.size > 0


def test_two_endpoints_on_one_postgres_count_each_update_once(tmp_path, postgres):
    RULES.save(tmp_path / "rules.safetensors")
    database = new_database(postgres, "shared")
    servers = [Server(tmp_path, database, None) for _ in range(2)]
    tokens = [*servers[0].tokens(), *servers[1].tokens()]

    def take_part(number: int) -> None:
        """Enrol at one endpoint and send one update to both."""
        callers = [Caller(f"http://127.0.0.1:{server.port}", number + 1, time.time) for server in servers]
        callers[number % 2].enrol(tokens[number])
        name, body = new_update_id(time.time()), body_of(update_of(number))
        for caller in (callers[number % 2], callers[1 - number % 2]):
            answer = caller.put(name, body)
            assert answer.status_code in (200, 201), answer.text
        for caller in callers:
            caller.http.close()

    try:
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            list(pool.map(take_part, range(2 * CLIENTS)))
        with Caller(f"http://127.0.0.1:{servers[1].port}", 1, time.time) as caller:
            told = caller.get("rounds").json()
    finally:
        for server in servers:
            server.stop()
    members = [version["members"] for version in told["versions"]]
    assert sum(members) + told["open"]["pending"] == 2 * CLIENTS
    assert members[0] >= CLIENTS
