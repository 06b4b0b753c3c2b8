"""Laws of the stopwatch: works take turns, the first round is not counted, figures are those of the rounds."""

from __future__ import annotations

import time

from fednl_runtime.stopwatch import Timing, interleaved, reads, rss_anon


def test_works_take_turns_and_each_runs_once_more_than_there_are_rounds():
    calls: list[str] = []
    interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4


def test_the_first_round_is_not_counted():
    naps = iter([0.2, 0.0, 0.0, 0.0])
    found = interleaved({"a": lambda: time.sleep(next(naps))}, rounds=3)["a"]
    assert found.high < 0.2


def test_sleeping_costs_time_and_no_computing():
    found = interleaved({"a": lambda: time.sleep(0.05)}, rounds=1)["a"]
    assert found.median >= 0.05 > 5 * found.cpu


def test_a_timing_is_the_median_and_the_range_of_its_rounds():
    found = Timing.of([3.0, 1.0, 8.0], [1.0, 1.0, 4.0])
    assert found == Timing(median=3, low=1, high=8, cpu=1)
    assert found.each(2) == Timing(median=1.5, low=0.5, high=4, cpu=0.5)


def test_all_threads_together_read_the_whole_array_once():
    with reads(3, size=8 * 1001) as works:
        assert [works["read_one"](), works["read_all"]()] == [1, [1, 1, 1]]


def test_memory_of_this_process_grows_by_what_it_keeps():
    before = rss_anon()
    kept = bytearray(b"x" * 30_000_000)
    after = rss_anon()
    assert before is not None
    assert after is not None
    assert after - before > 0.9 * len(kept)
