"""Laws of the sessions commands: what a running server keeps, looked after from the shell."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from fednl_runtime.engine import Engine
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.sessions import ago
from fednl_runtime.server_api.entrance.security import KeyRing, new_key


@pytest.fixture(autouse=True)
def three(http: httpx.Client, engine: Engine) -> Iterator[None]:
    """Session a has read two texts, b nothing."""
    for text in ("hello", "the hello"):
        body = {"prompt": text, "max_tokens": 0, "session_id": "a"}
        http.post("/v1/completions", json=body).raise_for_status()
    http.post("/v1/sessions", json={"id": "b", "frozen": True}).raise_for_status()
    yield
    for record in engine.sessions.page("", limit=1000):
        engine.sessions.delete(record.key)


def run(address: str, *args: str, code: int = 0, env: dict[str, str] | None = None) -> Any:
    """The result of a sessions command against the server at `address`."""
    result = CliRunner().invoke(cli, ["sessions", *args], env={"FEDNL_SESSIONS_SERVER": address, **(env or {})})
    assert result.exit_code == code, result.output
    return result


def said(address: str, *args: str) -> Any:
    """What a command answers in JSON."""
    return json.loads(run(address, *args, "--json").stdout)


def test_ls_lists_every_session_in_lines_and_as_json(address):
    assert [session["id"] for session in said(address, "ls")["sessions"]] == ["a", "b"]
    text = run(address, "ls").stdout
    assert "version 2" in text
    assert "frozen, in memory only" in text


def test_ls_reads_every_page(address, http, monkeypatch):
    monkeypatch.setattr("fednl_runtime.server_api.commands.sessions.PAGE", 1)
    assert len(said(address, "ls")["sessions"]) == 2


def test_show_tells_the_versions_to_go_back_to(address):
    assert [v["version"] for v in said(address, "show", "a")["versions"]] == [1, 2]
    assert "Versions to go back to" in run(address, "show", "a").stdout


def test_fork_and_rollback_name_versions_as_the_server_does(address, http):
    assert said(address, "fork", "a", "c", "--version", "1")["version"] == 1
    assert said(address, "rollback", "a")["tokens_seen"] == said(address, "show", "c")["tokens_seen"]
    assert said(address, "rollback", "a", "--turns", "1")["tokens_seen"] == 0
    http.post("/v1/sessions/c/snapshots", json={"name": "mine"})
    assert said(address, "rollback", "c", "--snapshot", "mine")["version"] == 2
    assert run(address, "rollback", "c", "--version", "0").stdout.startswith("c: version 3, 0 tokens")


def test_an_exported_session_can_be_imported_under_another_name(address, tmp_path):
    file = tmp_path / "a file"
    assert str(file) in run(address, "export", "a", "-o", str(file)).stdout
    assert (
        said(address, "import", str(file), "--id", "copy")["tokens_seen"] == said(address, "show", "a")["tokens_seen"]
    )
    assert said(address, "import", str(file))["id"].startswith("sess_")


def test_rm_forgets_every_session_that_is_named(address):
    assert run(address, "rm", "a", "b").stdout == "Deleted a.\nDeleted b.\n"
    assert said(address, "ls")["sessions"] == []


@pytest.mark.parametrize(
    "args",
    [
        ["show", "no"],
        ["show", "../b"],
        ["fork", "a", "b"],
        ["rollback", "a", "--turns", "9"],
        ["rm", "no"],
        ["export", "no"],
    ],
)
def test_a_refusal_is_the_servers_sentence_and_exit_code_1(address, args):
    result = run(address, *args, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith(("Error: There is", "Error: Session"))


def test_a_file_that_is_no_session_or_not_there_is_one_sentence(address, tmp_path):
    (tmp_path / "x").write_bytes(b"not a session")
    assert "damaged" in run(address, "import", str(tmp_path / "x"), code=1).stderr
    assert "No such file" in run(address, "import", str(tmp_path / "y"), code=1).stderr


def test_no_server_is_one_sentence_that_says_how_to_start_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "nonsense", "http://"):
        result = run(url, "ls", code=1)
        assert "fednl-runtime serve" in result.stderr


def test_the_key_comes_from_the_environment(engine, serve):
    secret, key = new_key("ann", ["sessions"])
    with serve(engine, keys=KeyRing([key])) as address:
        assert "Set FEDNL_API_KEY" in run(address, "ls", code=1, env={"FEDNL_API_KEY": ""}).stderr
        assert run(address, "ls", env={"FEDNL_API_KEY": f"{secret}\n"}).exit_code == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s ago"), (59, "59 s ago"), (125, "2 min ago"), (90_000, "1 d ago")]
)
def test_ages_are_told_in_the_largest_whole_unit(monkeypatch, seconds, text):
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert ago(1_000_000.0 - seconds) == text


def test_a_certificate_that_is_not_trusted_is_told_from_a_server_that_is_down(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    monkeypatch.setattr(httpx.Client, "request", refuse)
    assert "SSL_CERT_FILE" in run("https://127.0.0.1:1", "ls", code=1).output
