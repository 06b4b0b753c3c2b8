"""Laws of the fairness benchmark: every token of busy sessions is seen, and a long prompt arrives beside them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from engines import write_tiny_model
from fairness import Crowd, main, quantiles


def test_gaps_count_for_the_span_in_which_they_ended():
    crowd = Crowd(None, {})  # type: ignore[arg-type]
    crowd.gaps = [(1.0, 0.5), (2.0, 0.25), (3.0, 0.125)]
    assert crowd.between(1.5, 3.0) == [0.25]


def test_quantiles_are_in_milliseconds():
    found = quantiles([i / 1000 for i in range(101)])
    assert (found["p50"], found["p99"], found["max"]) == pytest.approx((50, 99, 100))


def test_a_round_over_a_real_server_tells_both_gaps_and_the_first_token(tmp_path):
    model = str(write_tiny_model(tmp_path / "tiny.onnx"))
    options = ["--sessions", "2", "--prompt", "400", "--rounds", "1", "--seconds", "0.5"]
    result = CliRunner().invoke(main, ["--model", model, *options])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["gap_ms"]["gaps"] > 10
    assert report["gap_with_prompt_ms"]["gaps"] > 1
    assert report["first_token_s"][0] > 0
    assert report["p99_ratio"] > 0
