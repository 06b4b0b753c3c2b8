"""A server that syncs: its routes and commands, what it records, and the rules it uses after a restart."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time

import httpx
import pytest
from agents import Phone, endpoint_of
from click.testing import CliRunner
from engines import running_engine, until, write_tiny_model
from fleets import fleet_of

from fednl_runtime.engine import EngineLimits
from fednl_runtime.export.quantize import file_parameters
from fednl_runtime.export.rules_graph import export_rules
from fednl_runtime.fed_sync.device.agent import Agent
from fednl_runtime.fed_sync.device.conditions import DeviceConditions
from fednl_runtime.fed_sync.device.schedule import Pace
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.fleet.blobs import DiskBlobs
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, found
from fednl_runtime.fed_sync.fleet.repository import Repository
from fednl_runtime.fed_sync.signing import key_file
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.onnx_backend import load
from fednl_runtime.rule_training import RuleSettings
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.syncing import SyncOptions, sync_folder, synced_engine
from fednl_runtime.session import SessionKey
from fednl_runtime.turn import TurnRequest


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path):
    (tmp_path / "fleet").mkdir()
    with fleet_of(tmp_path / "fleet") as fleet:
        yield dataclasses.replace(fleet, clock=time.time)


@pytest.fixture(name="served")
def served_fixture(fleet, tmp_path, serve):
    """The address of a server beside an agent that contacts only when it is told to."""
    with endpoint_of(fleet) as url, running_engine() as engine:
        phone = Phone(tmp_path / "phone", url, time.time, intake.new_token(fleet))
        agent = Agent(phone.part, DeviceConditions(needs_power=False, min_battery=0), Pace(interval_s=1e6, cap_s=1e6))
        with contextlib.closing(phone), serve(engine, agent=agent) as address:
            agent.start()
            yield address
            agent.stop()


def command(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(cli, ["sync", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_flush_pause_and_resume_over_http_and_from_the_shell(served):
    assert httpx.get(f"{served}/v1/sync/status").json()["version"] == 0
    assert command("pause", "--server", served)["state"] == "paused"
    assert httpx.post(f"{served}/v1/sync/flush").status_code == 200
    time.sleep(0.3)
    assert command("status", "--server", served)["version"] == 0
    assert command("resume", "--server", served)["state"] != "paused"
    until(lambda: httpx.get(f"{served}/v1/sync/status").json()["outbox"]["accepted"] == 1)
    status = command("status", "--server", served)
    assert (status["version"], status["last_error"]) == (1, None)
    assert status["updates"][0]["state"] == "accepted"


def test_metrics_tell_of_the_agent(served):
    text = httpx.get(f"{served}/metrics").text
    assert "fednl_runtime_sync_rules_version 0.0" in text
    assert 'fednl_runtime_sync_updates{state="accepted"} 0.0' in text


def test_a_status_tells_nothing_of_the_text_or_of_sessions(served):
    text = json.dumps(httpx.get(f"{served}/v1/sync/status").json())
    assert "anna" not in text


def test_a_server_that_syncs_nothing_says_so(http):
    for method, path in [("GET", "status"), ("POST", "flush"), ("POST", "pause"), ("POST", "resume")]:
        answer = http.request(method, f"/v1/sync/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "sync_off")


MODEL_SETTINGS = RuleSettings(steps=4, window=16, check_every=2, held_out=0.3, cpu_share=1.0)


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.onnx")
    export_rules(file_parameters(path), load(path).config, path)
    return path


@pytest.fixture(name="tiny_fleet")
def tiny_fleet_fixture(tmp_path, model):
    folder = tmp_path / "tiny fleet"
    folder.mkdir()
    repository = Repository(f"sqlite:///{folder / 'fleet.db'}")
    fleet = Fleet("p", repository, DiskBlobs(folder / "blobs"), key_file(folder / "signing.key"))
    found(fleet, load_gradients(model).defaults, Policy(goal=1000, minimum=1))
    yield fleet
    repository.close()


def options_for(fleet: Fleet, url: str) -> SyncOptions:
    return SyncOptions(
        sync=url,
        sync_population="p",
        sync_token=intake.new_token(fleet),
        sync_interval=0.05,
        sync_min_text=700,
        sync_steps=10,
        sync_on_battery=True,
        sync_cpu_share=1.0,
    )


def chat(engine, session: str = "me", tokens: int = 300) -> None:
    prompt = tuple(engine.tokenizer.encode("the hello thing that goes on and on. " * 100))[:tokens]
    list(engine.turn(TurnRequest(prompt, SamplingParams(max_tokens=2), session)))


def test_a_served_model_learns_from_its_turns_shares_and_keeps_new_rules(tiny_fleet, model, tmp_path):
    folder, state = tmp_path / "state/sessions/x", tmp_path / "state"
    limits, backend = EngineLimits(), load(model)
    with endpoint_of(tiny_fleet) as url:
        options = options_for(tiny_fleet, url)
        with synced_engine(backend, model, limits, folder, options) as (engine, agent):
            assert agent is not None
            until(lambda: agent.status()["version"] == 1)
            for _ in range(6):
                chat(engine)
            agent.flush()
            until(lambda: agent.status()["learnt"] or agent.status()["last_error"])
            until(lambda: agent.status()["outbox"]["accepted"] or agent.status()["last_error"])
            assert agent.status()["last_error"] is None
            assert agent.status()["recent_tokens"] >= 1800
            assert engine.backend is not backend
    own = sync_folder(state, backend.fingerprint)
    assert (own / "live.safetensors").exists()
    with synced_engine(backend, model, limits, folder, options) as (engine, agent):
        assert agent is not None
        assert agent.status()["version"] == 1
        engine.sessions.delete(SessionKey("", "me"))
        assert agent.status()["recent_tokens"] == 0


def test_a_server_that_no_longer_syncs_records_nothing_uses_live_rules_and_still_forgets(tiny_fleet, model, tmp_path):
    folder, backend = tmp_path / "state/sessions/x", load(model)
    with endpoint_of(tiny_fleet) as url:
        options = options_for(tiny_fleet, url)
        with synced_engine(backend, model, EngineLimits(), folder, options) as (engine, agent):
            assert agent is not None
            chat(engine)
            until(lambda: agent.status()["version"] == 1)
    recent = sync_folder(tmp_path / "state", backend.fingerprint) / "recent.db"
    with synced_engine(backend, model, EngineLimits(), folder, SyncOptions()) as (engine, agent):
        assert agent is None
        assert engine.backend is not backend
        before = recent.read_bytes()
        chat(engine, "other")
        assert recent.read_bytes() == before
        engine.sessions.delete(SessionKey("", "me"))
        assert len(recent.read_bytes()) == len(before)
        assert recent.read_bytes() != before


def test_without_sync_no_folder_is_made(model, tmp_path):
    folder, backend = tmp_path / "state/sessions/x", load(model)
    with synced_engine(backend, model, EngineLimits(), folder, SyncOptions()) as (engine, agent):
        chat(engine)
        assert agent is None
    assert not (tmp_path / "state/sync").exists()


def test_enrol_and_run_once_from_the_shell(tiny_fleet, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the hello thing that goes on and on. " * 200)
    where = ["--model", str(model), "--state-dir", str(tmp_path / "state")]
    with endpoint_of(tiny_fleet) as url:
        run = ["run", "--sync", url, "--sync-population", "p", "--sync-min-text", "700", "--text", str(text), "--once"]
        result = CliRunner().invoke(cli, ["sync", *run, *where])
        assert result.exit_code == 1
        assert "sync enrol" in result.output
        token = intake.new_token(tiny_fleet)
        enrolled = command("enrol", url, "--token", token, "--population", "p", *where)
        assert enrolled["population"] == "p"
        result = CliRunner().invoke(cli, ["sync", *run, "--sync-cpu-share", "1", "--sync-steps", "10", *where])
        assert result.exit_code == 0, result.output
        assert "accepted" in result.output


@pytest.mark.parametrize("option", [["--sync-quiet", "night"], ["--sync-interval", "soon"], ["--sync-cpu-share", "2"]])
def test_options_that_cannot_be_are_wrong_usage(option):
    result = CliRunner().invoke(cli, ["sync", "run", "--sync", "https://fleet.example", *option])
    assert result.exit_code == 2


def test_serve_refuses_to_sync_without_a_folder(model):
    result = CliRunner().invoke(
        cli, ["serve", str(model), "--in-memory", "--sync", "https://fleet.example", "--port", "0"]
    )
    assert result.exit_code == 2
    assert "--in-memory" in result.output
