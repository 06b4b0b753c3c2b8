"""Laws of the chat command: one session, its copies, and what it keeps on request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engines import write_tiny_model

from fednl_runtime.server_api.cli import cli


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


def talk(model: Path, script: list[str], *options: str) -> Any:
    """The result of a conversation in which no answer depends on chance."""
    command = ["chat", "--model", str(model), "--threads", "1", "--max-tokens", "4", "--temperature", "0"]
    result = CliRunner().invoke(cli, [*command, *options], input="\n".join([*script, ""]))
    assert result.exit_code == 0, result.output
    return result


def versions(result: Any) -> list[str]:
    """The version at each /stats."""
    return re.findall(r"^session \S+: version (\d+)", result.stderr, re.MULTILINE)


def seen(result: Any) -> list[str]:
    """The tokens read at each /stats."""
    return re.findall(r"(\d+) tokens? read, \d+ bytes", result.stderr)


def test_a_talk_is_one_session_that_can_stop_learning(model):
    script = [
        "/stats",
        "hello",
        "/stats",
        "/learn off",
        "hello",
        "/stats",
        "/learn on",
        "hello",
        "/stats",
        "/quit",
        "never",
    ]
    assert versions(talk(model, script)) == ["0", "1", "1", "2"]


def test_undo_takes_back_the_last_turn_and_the_talk_goes_on_as_if_it_had_not_been(model):
    undone = talk(model, ["hello", "other things", "/undo", "/stats", "again", "/stats"])
    plain = talk(model, ["hello", "/stats", "again", "/stats"])
    assert seen(undone) == seen(plain)
    assert undone.stdout.splitlines()[::2] == plain.stdout.splitlines()


def test_undo_without_a_turn_is_a_sentence_and_the_talk_goes_on(model):
    assert versions(talk(model, ["/undo", "hello", "/stats"])) == ["1"]


def test_a_copy_stays_as_it_was_and_can_be_gone_on_in(model):
    result = talk(model, ["hello", "/fork before", "/stats", "other", "/use before", "/stats", "/use chat", "/stats"])
    first, copy, last = seen(result)
    assert first == copy != last
    assert "other sessions: chat" in result.stderr


@pytest.mark.parametrize(
    "line", ["/fork ../x", "/fork chat", "/use nobody", "/learn maybe", "/nonsense", "/save /", "/fork"]
)
def test_what_cannot_be_done_is_said_and_changes_nothing(model, line):
    result = talk(model, ["hello", "/stats", line, "/stats"])
    assert versions(result) == ["1", "1"]
    assert len(set(seen(result))) == 1


def test_a_saved_session_is_gone_on_in_as_if_the_talk_had_not_ended(model, tmp_path):
    file = tmp_path / "a talk.safetensors"
    whole = talk(model, ["hello", f"/save {file}", "again", "/stats"])
    resumed = talk(model, ["again", "/stats"], "--session", str(file))
    assert resumed.stdout.splitlines() == whole.stdout.splitlines()[1:]
    assert seen(resumed) == seen(whole)


def test_a_file_that_is_no_session_is_one_sentence_and_exit_code_1(model, tmp_path):
    (tmp_path / "x").write_bytes(b"not a session")
    for name in ("x", "missing"):
        result = CliRunner().invoke(cli, ["chat", "--model", str(model), "--session", str(tmp_path / name)], input="")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("Error: ")
