"""Laws of doctor: what is in order is said, what is not is said with what to do, in the exit code too."""

from __future__ import annotations

import datetime
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificate
from click.testing import CliRunner
from engines import write_tiny_model

from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.checkup import certificate

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


def doctor(model: Path, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name."""
    result = CliRunner().invoke(cli, ["doctor", str(model), "--port", "0", "--json", *args])
    return result.exit_code, {row["name"]: row for row in json.loads(result.stdout)["findings"]}


def test_a_machine_in_order_is_said_to_be(model: Path, tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    (tmp_path / "keys").write_text('a = { scopes = ["infer"], sha256 = "' + "0" * 64 + '" }')
    options = ["--keys", str(tmp_path / "keys"), "--tls-cert", str(cert), "--tls-key", str(key)]
    code, found = doctor(model, "--state-dir", str(tmp_path / "new/state"), *options)
    assert [row for row in found.values() if not row["ok"]] == []
    assert code == 0
    assert list(found) == [
        "threads",
        "memory bandwidth",
        "model",
        "state folder",
        "key file",
        "TLS files",
        "certificate",
        "address",
    ]


def test_what_must_be_mended_is_named_and_the_exit_code_is_1(model: Path, tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = doctor(model, "--port", port, "--state-dir", str(open_folder), "--tls-cert", str(model))
    assert code == 1
    assert {name for name, row in found.items() if not row["ok"]} == {
        "state folder",
        "TLS files",
        "certificate",
        "address",
    }
    assert "chmod 700" in found["state folder"]["says"]


def test_a_model_that_cannot_run_here_is_a_finding(tmp_path: Path) -> None:
    broken = tmp_path / "m.onnx"
    broken.write_bytes(b"nothing")
    code, found = doctor(broken, "--state-dir", str(tmp_path / "s"))
    assert (code, found["model"]["ok"]) == (1, False)


@pytest.mark.parametrize(("days", "ok"), [(-1, False), (3, False), (100, True)])
def test_a_certificate_that_ends_soon_is_to_be_renewed(tmp_path: Path, days: int, ok: bool) -> None:
    cert, _ = write_certificate(tmp_path, until=NOW + datetime.timedelta(days=days), since=NOW - datetime.timedelta(9))
    assert certificate(cert, NOW).ok is ok


def test_people_get_a_table(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["doctor", str(model), "--port", "0", "--state-dir", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    assert "MEND" not in result.stdout
    assert "memory bandwidth" in result.stdout
