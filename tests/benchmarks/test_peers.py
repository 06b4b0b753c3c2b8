"""Laws of the comparison: arms run in turns in processes of their own, and a missing library is said, not fatal."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess

import pytest
import torch
from peer_arms import MAKERS, make
from peer_kit import Setting, count
from peers import draw, line, race

SETTING = Setting(threads=1, tokens=3, context=5, folder=None)  # type: ignore[arg-type]


@pytest.fixture(name="results", scope="module")
def results_fixture(tmp_path_factory):
    setting = dataclasses.replace(SETTING, folder=tmp_path_factory.mktemp("models"))
    wanted = [("memory hope", 5), ("memory hope eager", 5), ("memory titans", 5)]
    return race(wanted, setting, 3, subprocess.DEVNULL)


def test_an_arm_reports_speed_sizes_and_versions(results):
    ours, eager, _ = results
    assert ours["tokens_per_second"] > 0
    assert ours["parameters"] == eager["parameters"]
    assert ours["memory_bytes"] == eager["memory_bytes"] > 0
    assert ours["bytes_per_second"] == pytest.approx(
        (ours["weight_bytes"] + 2 * ours["memory_bytes"]) * ours["tokens_per_second"]
    )
    assert set(eager["versions"]) == {"torch"}


@pytest.mark.skipif(importlib.util.find_spec("titans_pytorch") is not None, reason="it is installed here")
def test_an_arm_whose_library_is_missing_is_absent(results):
    assert results[2] == {"arm": "memory titans", "context": 5, "absent": "No module named 'titans_pytorch'"}
    assert line(results[2]).endswith("absent: No module named 'titans_pytorch'")


def test_a_line_tells_speed_and_memory(results):
    assert "tokens/s" in line(results[0])
    assert "MB memory" in line(results[0])


def test_numbers_are_counted_in_nests():
    nest = [torch.zeros(2, 3), {"a": torch.zeros(4), "b": (torch.zeros(1), 7, None)}, torch.nn.Linear(2, 2, bias=False)]
    assert count(nest) == 6 + 4 + 1 + 4


def test_an_unknown_arm_is_our_own_mistake():
    with pytest.raises(KeyError):
        make("nobody", SETTING)


def test_the_picture_is_drawn_from_what_is_there(tmp_path):
    def result(context: int) -> dict[str, object]:
        return {"arm": "hope int8", "context": context, "seconds_a_token": {"median": 0.01}, "memory_bytes": 5e6}

    draw([result(64), result(1024), {"arm": "transformer", "context": 64, "absent": "gone"}], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_every_memory_is_compared_with_ours():
    assert sum(name.startswith("memory") for name in MAKERS) == 4
