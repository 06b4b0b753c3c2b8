"""Laws of the metrics: each moves when it should, and no label names a session, a user or a key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from engines import ENDLESS, running_engine, until
from prometheus_client.parser import text_string_to_metric_families

from fednl_runtime.engine import Engine
from fednl_runtime.guard import NormCaps
from fednl_runtime.server_api.entrance.security import key_ring

SERIES = r"_(bucket|count|sum|created)$"
"""What the names of a family's parts end in."""
DEPLOY = Path(__file__).parents[2] / "deploy"
Serve = Callable[..., contextlib.AbstractContextManager[str]]


def samples(address: str, **headers: str) -> dict[str, float]:
    """The value of each sample, by its name and labels."""
    text = httpx.get(f"{address}/metrics", headers=headers).raise_for_status().text
    families = text_string_to_metric_families(text)
    return {
        s.name.removeprefix("fednl_runtime_") + "".join(f" {value}" for _, value in sorted(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def post(address: str, **body: object) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json={"prompt": "abc", "max_tokens": 2, **body}, timeout=60)


def test_a_turn_moves_what_is_said_of_turns(serve: Serve) -> None:
    with running_engine() as engine, serve(engine) as address:
        before = samples(address)
        report = post(address, session_id="a", max_tokens=5, **ENDLESS).json()
        post(address, prompt="", max_tokens=3, learn=False)
        after = samples(address)
        moved = {name: value - before.get(name, 0) for name, value in after.items()}
        assert moved["requests_total 200 POST /v1/completions"] == 2
        assert moved["request_duration_seconds_count /v1/completions"] == 2
        assert moved["queue_wait_seconds_count"] == moved["time_to_first_token_seconds_count"] == 2
        assert moved["generation_tokens_total"] == moved["time_per_output_token_seconds_count"] + 2
        assert moved["generation_tokens_total"] >= 6
        assert moved["prompt_tokens_total"] >= report["usage"]["prompt_tokens"]
        assert moved["learn_disabled_turns_total"] == 1
        assert moved["memory_update_norm_count"] == 2
        assert moved["surprise_sum"] > 0
        assert (after["sessions stored"], after["sessions resident"]) == (1, 1)
        assert moved["session_persist_seconds_count"] == 1
        assert after["session_state_bytes"] == engine.state_bytes
        assert after["requests_running"] == after["requests_waiting"] == 0
        assert after["process_rss_anon_bytes"] > 1e6
        assert [name for name in after if name.startswith("build_info ")]
        assert [name for name in after if re.fullmatch("model_info.* tiny", name)]


def test_refusals_are_counted_by_their_reason(engine: Engine, serve: Serve) -> None:
    with serve(engine, keys=key_ring("key", None), max_body_bytes=10) as address:
        key = {"authorization": "Bearer key"}
        httpx.get(f"{address}/v1/models")
        httpx.get(f"{address}/nothing", headers=key)
        httpx.post(f"{address}/tokenize", content=b"a", headers=key)
        httpx.post(f"{address}/tokenize", json={"content": "long enough"}, headers=key)
        found = samples(address, **key)
    for reason in ("invalid_api_key", "not_found", "unsupported_media_type", "request_too_large"):
        assert found[f"requests_rejected_total {reason}"] == 1
    assert found["requests_total 404 GET other"] == 1


def test_turns_that_leave_no_trace_are_counted_by_their_reason(serve: Serve) -> None:
    with running_engine() as engine, serve(engine) as address:
        engine.caps = NormCaps(token=1e-9)
        assert post(address, session_id="a").status_code == 500
        engine.caps = NormCaps()
        engine.backend.delay_s = 0.01
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 900, **ENDLESS}, timeout=0.3)
        until(lambda: samples(address).get("requests_cancelled_total disconnect"))
        found = samples(address)
    assert found["memory_breaches_total"] == found["turn_rollbacks_total memory_breach"] == 1
    assert found["turn_rollbacks_total disconnect"] == 1


def test_a_replay_is_counted_and_learns_nothing_in_the_numbers_either(serve: Serve) -> None:
    with running_engine() as engine, serve(engine) as address:
        for _ in range(2):
            body = {"prompt": "abc", "max_tokens": 2, "session_id": "a"}
            httpx.post(f"{address}/v1/completions", json=body, headers={"idempotency-key": "once"}).raise_for_status()
        found = samples(address)
    assert (found["idempotent_replays_total"], found["memory_update_norm_count"]) == (1, 1)


def test_no_label_names_a_session_a_user_or_a_key(serve: Serve) -> None:
    with running_engine() as engine, serve(engine, keys=key_ring("canary-key", None)) as address:
        headers = {"authorization": "Bearer canary-key", "x-request-id": "canary-id"}
        body = {"prompt": "canary", "session_id": "canary-session", "user": "canary-user", "max_tokens": 1}
        httpx.post(f"{address}/v1/completions", json=body, headers=headers).raise_for_status()
        httpx.get(f"{address}/v1/sessions/canary-session", headers=headers)
        httpx.request("CANARY", f"{address}/canary", headers=headers)
        text = httpx.get(f"{address}/metrics", headers=headers).text
    assert "canary" not in text.lower()
    assert "default" not in text


def metric_names(address: str) -> set[str]:
    text = httpx.get(f"{address}/metrics").text
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) | set(re.findall(r"^(\w+)[ {]", text, re.MULTILINE))


def test_the_dashboard_asks_for_metrics_that_exist_and_the_page_tells_of_all(serve: Serve) -> None:
    with running_engine() as engine, serve(engine) as address:
        post(address, session_id="a")
        served = metric_names(address)
    dashboard = (DEPLOY / "grafana/dashboards/fednl-runtime.json").read_text()
    asked = set(re.findall(r"fednl_runtime_\w+", dashboard))
    assert len(asked) > 20
    assert sorted(asked - served) == []
    page = (DEPLOY.parent / "docs/operations.md").read_text().partition("## Metrics")[2].partition("## ")[0]
    told = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    families = {name for name in served if name.startswith("fednl_runtime_") and not re.search(SERIES, name)}
    assert told == {name.removeprefix("fednl_runtime_") for name in families}
