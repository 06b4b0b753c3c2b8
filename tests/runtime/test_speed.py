"""Laws of the speed measurements: traffic by hand, rows that differ in position, what a long session reports."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engines import NumpyBackend, write_tiny_model

from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.speed import (
    BATCHES,
    Node,
    adaptation,
    by_operator,
    call_bytes,
    drift,
    nodes,
    one_by_one,
    rate_of,
    reading,
    soak,
    spread_out,
    weight_bytes,
)
from fednl_runtime.stopwatch import Timing


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


def test_a_call_moves_the_weights_once_and_each_memory_in_and_out(path):
    model = load(path, 1).model
    assert weight_bytes(model, 10**9) == 4 * model.parameters
    assert call_bytes(model, 10**9, 3) - call_bytes(model, 10**9, 1) == 4 * model.state_bytes


def test_a_quantised_model_is_read_as_its_file_holds_it_but_for_the_tokenizer():
    model = load(default_model_path(), 1).model
    quantised = dataclasses.replace(model, metadata={"quantization": "int8"})
    assert weight_bytes(quantised, 10**8) == 10**8 - len(model.tokenizer_json.encode())


def test_rows_of_a_batch_stand_at_different_places_of_a_segment():
    positions = [state.position[0] % 7 for state in map(spread_out(NumpyBackend(segment=7), 4).snapshot, range(4))]
    assert len(set(positions)) == 4


def test_every_row_reads_every_step():
    backend = NumpyBackend(segment=7)
    stream = spread_out(backend, 3)
    before = np.array([stream.snapshot(row).position[0] for row in range(3)])
    one_by_one(stream, 3, 9)()
    assert [stream.snapshot(row).position[0] for row in range(3)] == (before + 9).tolist()


def test_a_rate_counts_tokens_and_its_call_is_one_call():
    rate = rate_of(Timing(2.0, 1.0, 4.0, 2.0), tokens=40, calls=10, traffic=8)
    assert (rate.tokens_per_second, rate.call.median, rate.bytes_per_second) == (20, 0.2, 40)


def test_reading_reports_prefill_every_batch_and_the_bandwidth(path):
    backend = load(path, 1)
    found = reading(backend, path.stat().st_size, 1, backend.segment, 1)
    assert list(found.rates) == ["prefill", *(f"decode_{rows}" for rows in BATCHES)]
    assert all(rate.tokens_per_second > 0 for rate in found.rates.values())
    assert min(found.bandwidth_one, found.bandwidth_all) > 1e8


def test_a_prompt_is_read_in_whole_segments_however_few_steps_are_asked_for(path):
    backend = load(path, 1)
    found = reading(backend, path.stat().st_size, 1, 1, 1).rates["prefill"]
    assert found.tokens_per_second * found.call.median == pytest.approx(backend.segment)


def test_adaptation_is_measured_in_three_arms_of_one_graph():
    assert list(adaptation(NumpyBackend(), 2, 1)) == ["all_learn", "slow_frozen", "all_frozen"]


def test_the_nodes_of_a_token_are_counted(path):
    found = {node.operator: node for node in nodes(path, 1, 8)}
    assert found["LinearAttention"].nodes == load(path, 1).model.operators["LinearAttention"]
    assert all(node.microseconds >= 0 for node in found.values())


def test_events_of_kernels_are_added_up_by_operator_and_a_branch_is_counted_once():
    def event(name: str, operator: str, start: int, duration: int) -> dict[str, object]:
        return {"cat": "Node", "name": name, "args": {"op_name": operator}, "ts": start, "dur": duration}

    events = [event("a_kernel_time", "Mul", 0, 4), event("b_kernel_time", "Mul", 12, 6)]
    events += [event("c_kernel_time", "If", 10, 30), event("d_kernel_time", "Add", 45, 2)]
    events += [event("a_fence_before", "Mul", 0, 99), {"cat": "Session", "name": "x_kernel_time", "dur": 99}]
    assert by_operator(events, 2) == [Node("If", 0.5, 12), Node("Mul", 1, 5), Node("Add", 0.5, 1)]


def test_a_long_session_reads_about_what_it_was_asked_to_and_tells_every_piece():
    pieces: list[int] = []
    found = soak(NumpyBackend(segment=7), 1400, pieces.append)
    assert found.tokens == sum(pieces) == 1400
    assert len(pieces) == 100
    assert found.drift_percent is not None
    assert abs(found.drift_percent) < 50


def test_half_of_a_long_session_is_read_in_segments_and_half_token_by_token():
    backend, lengths = NumpyBackend(segment=7), []
    opened = backend.open

    def counting(state):
        stream = opened(state)
        feed = stream.feed
        stream.feed = lambda tokens, *rest: (lengths.append(tokens.shape[1]), feed(tokens, *rest))[1]
        return stream

    backend.open = counting
    soak(backend, 28, lambda _: None)
    assert lengths == 2 * [7, *7 * [1]]


def test_drift_leaves_the_warm_up_out():
    assert drift([10] * 10 + [100] * 80 + [110] * 10) == pytest.approx(10)
