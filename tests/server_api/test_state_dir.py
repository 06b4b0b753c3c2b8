"""Laws of the folder in which a server keeps its sessions: over a restart, a crash, another model."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from engines import CONFIG, tiny_tokenizer_json, write_tiny_model
from models import random_params

from fednl_runtime.export.graph import export_model
from fednl_runtime.server_api.commands.local import duration
from fednl_runtime.server_api.commands.state_dir import default_state_dir, described, model_folder, other_models

COMMAND = [sys.executable, "-c", "from fednl_runtime.server_api.cli import main; main()"]
SERVE = [*COMMAND, "serve", "--port", "0", "--threads", "1"]


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


@contextlib.contextmanager
def server(model: Path, *args: str, end: signal.Signals = signal.SIGTERM) -> Iterator[tuple[httpx.Client, str]]:
    """A client of a server process, and what that said when it began; the process ends by `end`."""
    with subprocess.Popen([*SERVE, str(model), *args], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        banner = ""
        while "curl -N " not in banner:
            line = process.stderr.readline()
            assert line, banner
            banner += line
        try:
            address = banner.split("curl -N ")[1].partition("/v1/")[0]
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client, banner
        finally:
            process.send_signal(end)
            process.wait(60)


def read(client: httpx.Client, text: str, **fields: object) -> dict[str, object]:
    body = {"prompt": text, "session_id": "a", "max_tokens": 0, **fields}
    return dict(client.post("/v1/completions", json=body).raise_for_status().json()["session"])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_a_session_goes_on_after_a_restart_as_if_there_had_been_none(model, tmp_path, end):
    with server(model, "--state-dir", str(tmp_path / "kept"), end=end) as (client, banner):
        assert f"kept in {tmp_path / 'kept'}" in banner
        assert read(client, "hello")["persisted"] is True
    with server(model, "--state-dir", str(tmp_path / "kept")) as (client, _):
        assert client.get("/v1/sessions/a").json()["resident"] is False
        restored = read(client, " the hello")
    with server(model, "--in-memory") as (client, banner):
        assert "forgotten when the server stops" in banner
        assert read(client, "hello")["persisted"] is False
        plain = read(client, " the hello")
    names = ("version", "tokens_seen", "surprise", "update_norm")
    assert [restored[name] for name in names] == [plain[name] for name in names]


def test_another_model_meets_no_foreign_memory_and_leaves_it_for_its_own(model, tmp_path):
    config = dataclasses.replace(CONFIG, memory_period=8, top_period=8, cms_periods=(16, 48))
    other = tmp_path / "other.onnx"
    export_model(random_params(config, 7), config, tiny_tokenizer_json(), other, name="other")
    kept = ("--state-dir", str(tmp_path / "kept"))
    with server(model, *kept) as (client, banner):
        assert "other model" not in banner
        read(client, "hello")
    with server(other, *kept) as (client, banner):
        assert "1 other model left sessions there" in banner
        assert client.get("/v1/sessions").json()["data"] == []
        read(client, "hello")
    with server(model, *kept) as (client, _):
        assert [session["version"] for session in client.get("/v1/sessions").json()["data"]] == [1]


def test_a_folder_serves_one_process_at_a_time(model, tmp_path):
    with server(model, "--state-dir", str(tmp_path)):
        second = subprocess.run([*SERVE, str(model), "--state-dir", str(tmp_path)], capture_output=True, text=True)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.startswith("Error: Another process keeps its sessions in ")


def test_a_folder_that_cannot_be_used_is_one_sentence(model, tmp_path):
    (tmp_path / "file").write_text("")
    for args, code in ((["--state-dir", str(tmp_path / "file/x")], 1), (["--in-memory", "--state-dir", "x"], 2)):
        result = subprocess.run([*SERVE, str(model), *args], capture_output=True, text=True)
        assert result.returncode == code
        assert result.stderr.splitlines()[-1].startswith("Error: ")
        assert "Traceback" not in result.stderr


def test_a_session_has_the_time_to_live_of_the_server_unless_it_sets_its_own(model, tmp_path):
    with server(model, "--state-dir", str(tmp_path), "--session-ttl", "7d") as (client, _):
        read(client, "hello")
        assert client.get("/v1/sessions/a").json()["ttl_s"] == 7 * 86400
        assert client.post("/v1/sessions", json={"ttl_s": None}).json()["ttl_s"] is None


def test_versions_are_kept_as_many_as_were_asked_for(model, tmp_path):
    with server(model, "--in-memory", "--versions", "2") as (client, _):
        for _ in range(4):
            read(client, "hello", session_mode="append")
        assert [v["version"] for v in client.get("/v1/sessions/a").json()["versions"]][-2:] == [3, 4]
        assert client.post("/v1/sessions/a/rollback", json={"version": 2}).status_code == 404


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10m", 600), ("12h", 43200), ("7d", 604800)])
def test_durations_are_whole_seconds_minutes_hours_or_days(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0s", "-1s", "1.5h", "1w"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(click.BadParameter):
        duration(text)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/fednl-runtime"),
        ({"XDG_STATE_HOME": "", "HOME": "/h"}, "/h/.local/state/fednl-runtime"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/fednl-runtime"),
    ],
)
def test_the_default_folder_is_where_xdg_has_it(environment, folder):
    assert default_state_dir(environment) == Path(folder)


def test_folders_without_sessions_are_no_models(tmp_path):
    folder = model_folder(tmp_path, "a" * 64)
    for other in ("b", "c", "d"):
        (folder.parent / other).mkdir(parents=True)
    (folder.parent / "b/sessions.db").write_text("")
    assert other_models(folder) == 1
    (folder.parent / "c/sessions.db").write_text("")
    assert "2 other models left sessions there" in described(folder)


def test_nobody_else_can_read_what_is_kept(model, tmp_path):
    with server(model, "--state-dir", str(tmp_path / "kept")) as (client, _):
        read(client, "hello")
    paths = list((tmp_path / "kept/sessions").rglob("*"))
    assert len(paths) > 3
    assert [path for path in paths if path.stat().st_mode & 0o077 and path.is_file()] == []
