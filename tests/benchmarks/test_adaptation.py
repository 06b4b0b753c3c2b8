"""Laws of the graph without updates: it computes what the model computes when nothing learns, and only that."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from adaptation import still_decoder, without_updates
from engines import CONFIG, write_tiny_model
from models import random_state

from fednl_runtime.onnx_backend import load, open_session, session_options
from fednl_runtime.speed import STILL
from fednl_runtime.state import MemoryState


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


def still_session(path, folder):
    backend = load(path, 1)
    onnx.save(without_updates(onnx.load(path), backend.model.state), folder / "still.onnx")
    return backend, open_session(folder / "still.onnx", session_options(1))


def test_it_computes_the_logits_of_a_model_that_does_not_learn(path, tmp_path):
    backend, session = still_session(path, tmp_path)
    state = random_state(backend.config, position=1)
    state = MemoryState({n: t.astype(np.float32) for n, t in state.tensors.items()}, state.position)
    expected = backend.open(state).feed(np.array([[3]]), np.array([STILL], np.float32)).copy()
    inputs = {"input_ids": np.array([[3]]), "position": state.position, "adapt": np.array([STILL], np.float32)}
    inputs |= {f"past.{name}": tensor for name, tensor in state.tensors.items()}
    used = {value.name for value in session.get_inputs()}
    (logits,) = session.run(["logits"], {name: value for name, value in inputs.items() if name in used})
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)


def test_no_node_writes_a_memory_and_no_branch_closes_a_chunk(path, tmp_path):
    backend, session = still_session(path, tmp_path)
    operators = {node.op_type for node in onnx.load(tmp_path / "still.onnx").graph.node}
    assert not operators & {"LinearAttention", "If", "ScatterND"}
    assert [value.name for value in session.get_outputs()] == ["logits"]
    still_decoder(session, backend.model, 3)()


def test_the_tiny_model_has_both_profiles():
    assert set(CONFIG.layers) == {"delta", "self_modifying"}
