"""docs/sessions.md tells what the routes and options do, and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from fednl_runtime.records import MAX_UPDATES, Update
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.local import size
from fednl_runtime.server_api.commands.serve import serve
from fednl_runtime.server_api.routes import reading as reading_routes
from fednl_runtime.server_api.routes import sessions as session_routes
from fednl_runtime.server_api.schemas.sessions import MAX_NAME, MAX_PAIRS, MAX_VALUE
from fednl_runtime.vault import StoreLimits

PAGE = (Path(__file__).parents[2] / "docs/sessions.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def listed(section: str) -> list[str]:
    """The names in the first column of a section's table."""
    rows = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_page_lists_what_is_told_of_a_session(http):
    session = http.post("/v1/sessions").json()
    assert sorted(listed("What is told of a session")) == sorted(session)
    http.post(f"/v1/sessions/{session['id']}/ingest", json={"text": "hello"})
    (version,) = http.get(f"/v1/sessions/{session['id']}").json()["versions"]
    assert [name for name in version if f"`{name}`" not in SECTIONS["What is told of a session"]] == []


def test_the_page_names_every_route_of_sessions():
    ends = {route.path.rpartition("}/")[2] for m in (session_routes, reading_routes) for route in m.router.routes}
    assert [end for end in ends if end not in PAGE.replace("{session_id}/snapshots/", "")] == []


def test_the_page_tells_the_entries_of_the_log():
    text = SECTIONS["Learn and score a text"]
    assert [name for name in Update.__dataclass_fields__ if name != "version" and f"`{name}`" not in text] == []
    assert f"{MAX_UPDATES:,} entries" in text.replace("\n", " ")


def test_the_page_tells_the_limits():
    limits = StoreLimits()
    assert f"The last {limits.versions} are kept" in PAGE
    assert f"up to {limits.snapshots} of them" in PAGE
    assert f"up to {MAX_PAIRS} pairs of strings, names up to {MAX_NAME} and values up to {MAX_VALUE}" in PAGE
    defaults = {max(option.opts, key=len): option.default for option in serve.params}
    rows = re.findall(r"^\| `(--\S+)` \|.*\| (\S+) \|$", SECTIONS["Where sessions are kept"], re.MULTILINE)
    assert [(flag, value) for flag, value in rows if value not in (str(defaults[flag]), "never")] == []
    assert {flag for flag in defaults if flag.startswith("--session-")} < {flag for flag, _ in rows}
    assert (size("1G"), size("16G")) == (limits.resident_bytes, limits.stored_bytes)


def test_the_commands_of_the_page_run_one_after_the_other(http, address, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    http.post("/v1/sessions", json={"id": "notes"}).raise_for_status()
    for text in ("hello", "the hello"):
        http.post("/v1/sessions/notes/ingest", json={"text": text}).raise_for_status()
    block = re.findall(r"```sh\n(fednl-runtime sessions .*?)```", PAGE, re.DOTALL)[0]
    commands = [shlex.split(line.replace("http://127.0.0.1:8080", address))[1:] for line in block.splitlines()]
    assert {words[1] for words in commands} == {"ls", "show", "fork", "rollback", "export", "import", "rm"}
    for words in commands:
        result = CliRunner().invoke(cli, words, env={"FEDNL_SESSIONS_SERVER": address})
        assert result.exit_code == 0, (words, result.output)
