"""Laws of `bench`: one JSON object with every figure, the same figures as tables."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from engines import write_tiny_model

from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.bench import in_markdown

PARTS = {
    "rates",
    "bandwidth_one",
    "bandwidth_all",
    "adaptation_seconds",
    "turns",
    "keeping",
    "nodes",
    "roofline",
    "soak",
}


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.onnx"))


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", "--threads", "1", "--rounds", "1", "--steps", "3", *arguments])


def test_the_last_line_is_an_object_with_every_figure(path):
    result = run(path, "--json", "--soak", "100")
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0, result.output
    assert set(report) >= PARTS
    rate = report["rates"]["decode_8"]
    assert report["roofline"]["decode_8"] == pytest.approx(
        rate["bytes_per_second"] / max(report["bandwidth_one"], report["bandwidth_all"])
    )


@pytest.mark.parametrize("option", [(), ("--markdown",)])
def test_people_get_tables(path, option):
    result = run(path, "--soak", "100", *option)
    assert result.exit_code == 0, result.output
    for words in ("decode_16", "slow frozen", "restore", "LinearAttention", "CPU time of a token"):
        assert words in result.stdout


def test_json_and_markdown_exclude_each_other(path):
    assert run(path, "--json", "--markdown").exit_code == 2


def test_markdown_has_a_line_for_each_row():
    assert in_markdown("T", ("", "x"), [("a", "1")]) == "**T**\n\n|  | x |\n| --- | --- |\n| a | 1 |\n"
