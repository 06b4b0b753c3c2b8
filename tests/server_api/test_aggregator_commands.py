"""The operator's commands found a fleet, let devices in, show its rounds and step in, in plain sentences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from fleets import join, send
from updates import RULES, one_hot

from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import found
from fednl_runtime.rules import RuleSet
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.aggregator import aggregator, fleet_at, policy_of

PROGRAM = Path(sys.executable).with_name("fednl-runtime")


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["aggregator", *arguments, "--state-dir", str(folder), "--population", "p"])


@pytest.fixture(name="folder")
def folder_fixture(tmp_path):
    fleet = fleet_at(tmp_path, None, "p")
    found(fleet, RULES, Policy(goal=100, minimum=1))
    fleet.repository.close()
    return tmp_path


def update(folder: Path, number: int, base: int = 1) -> None:
    """A device joins and sends an update."""
    fleet = fleet_at(folder, None, "p")
    send(fleet, join(fleet, number), one_hot(number, base_version=base))
    fleet.repository.close()


def test_an_operator_sees_the_round_closes_it_and_goes_back(folder):
    update(folder, 1)
    assert json.loads(run(folder, "rounds").output)["open"]["pending"] == 1
    assert run(folder, "publish").output == "Version 2: published, of 1 updates.\n"
    assert run(folder, "rollback", "--to", "1").output == "Version 3 holds the rules of version 1.\n"
    seen = json.loads(run(folder, "rounds").output)
    assert [version["state"] for version in seen["versions"]] == ["published", "withdrawn", "published"]


def test_pause_resume_devices_and_revoke(folder):
    update(folder, 1)
    assert run(folder, "pause").exit_code == 0
    assert json.loads(run(folder, "rounds").output)["paused"] is True
    assert run(folder, "resume").exit_code == 0
    device = json.loads(run(folder, "devices").output)
    assert device["status"] == "active"
    assert "refused" in run(folder, "revoke", device["device"]).output
    assert json.loads(run(folder, "devices").output)["status"] == "revoked"


def test_a_token_comes_with_the_key_to_pin(folder):
    told = json.loads(run(folder, "token", "--days", "1").output)
    assert told["population"] == "p"
    assert told["token"].startswith("fednl_")
    assert len(told["manifest_key"]) == 44


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("publish",), "needs 1 updates"),
        (("rollback", "--to", "1"), "no earlier one"),
        (("release", "--version", "9"), "does not exist"),
        (("revoke", "dev_x"), "No device"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_1(folder, arguments, sentence):
    result = run(folder, *arguments)
    assert (result.exit_code, sentence in result.output) == (1, True)


def test_commands_on_a_fleet_that_does_not_exist_say_so_and_found_none(tmp_path):
    result = run(tmp_path / "new", "rounds")
    assert (result.exit_code, "holds no fleet" in result.output) == (1, True)
    assert not (tmp_path / "new").exists()


def test_another_population_of_a_folder_is_not_founded_by_a_look(folder):
    result = CliRunner().invoke(cli, ["aggregator", "rounds", "--state-dir", str(folder), "--population", "another"])
    assert (result.exit_code, "No population" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--goal", "2"), "above the goal"),
        (("--rule", "median", "--faulty", "3"), "needs 7 updates"),
        (("--rule", "multi_krum"), "may be faulty"),
        (("--rule", "median", "--faulty", "1", "--noise-multiplier", "1"), "cannot be combined"),
        (("--database", "nonsense://x"), "database does not work"),
        (("--database", "postgresql+psycopg://nobody@localhost:1/x"), "database does not work"),
        (("--rules", "missing.safetensors"), "missing.safetensors"),
    ],
)
def test_a_fleet_that_cannot_run_is_refused_at_the_start(tmp_path, arguments, sentence):
    result = run(tmp_path, "serve", *arguments)
    assert result.exit_code in (1, 3)
    assert sentence in result.output


def test_rules_of_another_model_are_refused(folder, tmp_path):
    RuleSet(RULES.tensors, "e" * 64).save(tmp_path / "other.safetensors")
    result = run(folder, "serve", "--rules", str(tmp_path / "other.safetensors"))
    assert "another model" in result.output


def test_every_setting_reaches_the_policy():
    serve = aggregator.commands["serve"]
    context = serve.make_context("serve", ["--state-dir", "x", "--noise-multiplier", "4", "--optimizer", "adam"])
    policy = policy_of(context.params)
    assert (policy.optimizer.kind, policy.privacy.noise_multiplier, policy.privacy.max_epsilon) == ("adam", 4.0, 8.0)
    plain = serve.make_context("serve", ["--state-dir", "x"])
    assert policy_of(plain.params) == Policy()


def test_a_served_fleet_says_where_it_is_and_stops_when_told(folder):
    command = [PROGRAM, "aggregator", "serve", "--state-dir", str(folder), "--population", "p", "--port", "0"]
    environment = {**os.environ, "FEDNL_ADMIN_TOKEN": "secret\n"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        url = re.search(r"http://\S+", server.stderr.readline())[0]
        assert "manifest key" in server.stderr.readline()
        admin = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/admin/populations/p", headers=admin).json()["current_version"] == 1
        server.terminate()
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize("secret", ["signing.key", "blobs", "."])
def test_the_state_folder_is_for_its_owner_only(tmp_path, secret):
    fleet_at(tmp_path / "state", None, "p").repository.close()
    assert (tmp_path / "state" / secret).stat().st_mode & 0o077 == 0
