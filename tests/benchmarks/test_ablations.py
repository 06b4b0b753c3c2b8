"""Laws of the ablations' bookkeeping: what is done is not done again, and the table compares equal seeds."""

from __future__ import annotations

import json

import pytest
from ablation_table import differences, read_rows, spread, table
from ablations import averages, by_thousands, finished


def line(arm: str, seed: int, on: float, tokens: int = 8, batch: int = 4) -> dict[str, object]:
    fields = {f"{g}_{n}": v for g in ("seen", "unseen") for n, v in (("on", on), ("on_vs_reset_percent", -on))}
    return {"arm": arm, "seed": seed, "tokens": tokens, "batch": batch, "parameters": 1000, **fields}


def test_a_queue_knows_what_its_output_holds(tmp_path):
    output = tmp_path / "a.jsonl"
    assert finished(output) == set()
    output.write_text("".join(json.dumps(line("x", seed, 1.0)) + "\n" for seed in (1, 2)))
    assert finished(output) == {("x", 1, 8, 4), ("x", 2, 8, 4)}


def test_the_curve_averages_whole_stretches_of_tokens():
    assert by_thousands([1.0, 3.0, 5.0, 7.0, 9.0], tokens=10, every=20) == [2.0, 6.0, 9.0]


def test_seen_and_unseen_sources_are_averaged_apart():
    result = averages({"on": [1.0] * 6 + [3.0, 5.0], "reset": [2.0] * 6 + [4.0, 5.0]})
    assert result["seen_on"] == 1
    assert result["seen_on_vs_reset_percent"] == -50
    assert result["unseen_on"] == 4
    assert result["unseen_on_vs_reset_percent"] == -12.5


def test_an_arm_is_compared_with_the_base_of_the_same_seed():
    lines = [line("ddsd", 1, 2.0), line("ddsd", 2, 4.0), line("x", 2, 5.0), line("x", 3, 9.0), line("x", 1, 9.0, 16)]
    lines.append(line("x", 1, 9.0, batch=8))
    rows = read_rows("\n".join(map(json.dumps, lines)), 8, 4)
    assert differences(rows, "x", "seen_on") == [25.0]
    assert table(rows).splitlines()[-1] == "| x | 2 | 1,000 | +25.00 | +25.00 | -7.00 ± 2.00 | -7.00 ± 2.00 |"


def test_the_spread_is_half_the_range():
    assert spread([1.0]) == "+1.00"
    assert spread([-1.0, 2.0]) == "+0.50 ± 1.50"
    assert float(spread([0.125, 0.125]).split()[0]) == pytest.approx(0.125, abs=0.01)
