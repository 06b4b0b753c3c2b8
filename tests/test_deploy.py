"""The examples in deploy/ start commands that exist, with options and routes that these have."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.entrance.scopes import METRICS, OPEN, ROUTES

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def calls(text: str) -> list[list[str]]:
    """The words of each call of the program, wherever it stands."""
    listed = [", ".join(found) for found in re.findall(r"command: \[(serve)(.*?)\]", text)]
    plain = re.findall(r"fednl-runtime ((?:serve|doctor|keys new) .*)", text)
    return [shlex.split(call.replace(",", " ")) for call in (*listed, *plain)]


def options(words: list[str]) -> set[str]:
    command = cli.get_command(click.Context(cli), words[0])
    if isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words[1])
    assert command is not None
    return {flag for parameter in command.params for flag in parameter.opts}


@pytest.mark.parametrize("name", ["compose.yaml", "fednl-runtime.service"])
def test_every_call_has_options_that_exist(name: str) -> None:
    found = calls((DEPLOY / name).read_text())
    assert len(found) == {"compose.yaml": 3, "fednl-runtime.service": 2}[name]
    for words in found:
        assert {word for word in words if word.startswith("--")} <= options(words), words


def test_the_server_has_more_time_to_stop_than_its_requests_have_to_end() -> None:
    command = cli.get_command(click.Context(cli), "serve")
    assert command is not None
    drain = next(parameter.default for parameter in command.params if parameter.name == "drain_timeout")
    for name, setting in [("compose.yaml", "stop_grace_period: "), ("fednl-runtime.service", "TimeoutStopSec=")]:
        found = re.search(rf"{setting}(\d+)", (DEPLOY / name).read_text())
        assert found
        assert int(found[1]) > drain


def test_the_image_is_healthy_when_the_server_takes_work() -> None:
    found = re.search(r"HEALTHCHECK.*?:8080(/[^']*)'", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    assert found
    assert found[1] == "/health/ready"
    assert ROUTES[f"GET {found[1]}"] == OPEN


def test_prometheus_comes_with_a_key_for_metrics_to_where_the_server_listens() -> None:
    assert ROUTES["GET /metrics"] == METRICS
    assert "credentials_file: /run/secrets/metrics_key" in (DEPLOY / "prometheus.yml").read_text()
    assert "server:8080" in (DEPLOY / "prometheus.yml").read_text()
    assert f"--scopes {METRICS} --file keys.toml > metrics.key" in (DEPLOY / "compose.yaml").read_text()


def test_the_dashboard_asks_the_provisioned_source_and_no_two_panels_share_a_place() -> None:
    panels = json.loads((DEPLOY / "grafana/dashboards/fednl-runtime.json").read_text())["panels"]
    source = (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    assert {panel["datasource"]["uid"] for panel in panels} == set(re.findall(r"uid: (\w+)", source))
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
