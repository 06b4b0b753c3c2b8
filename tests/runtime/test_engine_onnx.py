"""Laws of the engine on a model file: any split and any neighbours, the same bits."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import TOKENIZER, committed, write_tiny_model

from fednl_runtime.engine import Engine, EngineLimits, Outcome
from fednl_runtime.onnx_backend import load
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import TokenEvent, TurnRequest

PROMPT = tuple(TOKENIZER.encode("the other day hello the other day " * 5))
PARAMS = SamplingParams(seed=5, max_tokens=33)


@pytest.fixture(name="engine", scope="module")
def engine_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    backend = load(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx"), threads=1)
    engine = Engine(backend, Tokenizer(backend.tokenizer_json), EngineLimits(slots=3))
    yield engine
    engine.shutdown()


def answer(engine: Engine, prompt: tuple[int, ...], session_id: str, params: SamplingParams = PARAMS) -> list[int]:
    """The tokens of a turn."""
    return [e.token for e in engine.turn(TurnRequest(prompt, params, session_id)) if isinstance(e, TokenEvent)]


def tensors(engine: Engine, session_id: str) -> dict[str, Any]:
    """The memory of a session and its last logits."""
    session = committed(engine, session_id)
    return {**session.state.tensors, "logits": session.logits}


@pytest.mark.parametrize(("cut", "bound"), [(1, 2e-5), (7, 2e-5), (23, 2e-5), (8, 0), (16, 0)])
def test_a_prompt_cut_into_two_turns_leaves_the_same_memory(engine: Engine, cut: int, bound: float) -> None:
    # A cut between segments makes the same calls; one inside makes other lengths, which round
    # differently. Short, because random weights make a chaotic memory that multiplies any rounding.
    prompt, silent = PROMPT[:30], SamplingParams(max_tokens=0)
    answer(engine, prompt, f"whole{cut}", silent)
    answer(engine, prompt[:cut], f"cut{cut}", silent)
    answer(engine, prompt[cut:], f"cut{cut}", silent)
    other = tensors(engine, f"cut{cut}")
    for name, tensor in tensors(engine, f"whole{cut}").items():
        np.testing.assert_allclose(other[name], tensor, rtol=bound, atol=bound, err_msg=name)


def test_neighbours_change_nothing_but_the_order_of_sums(engine: Engine) -> None:
    names = ["n0", "n1", "n2", "n3", "n4"]
    alone = {name: answer(engine, PROMPT[i:], f"alone-{name}") for i, name in enumerate(names)}
    turns: dict[str, Any] = {}
    for i, name in enumerate(names):
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        turns[name] = engine.start(TurnRequest(PROMPT[i:], PARAMS, name), inbox.put), inbox
    for name, (turn, inbox) in turns.items():
        tokens = []
        while not isinstance(event := inbox.get(timeout=60), Outcome):
            tokens += [event.token] if isinstance(event, TokenEvent) else []
        turn.commit(event)
        assert tokens == alone[name]
        own = tensors(engine, f"alone-{name}")
        for key, tensor in tensors(engine, name).items():
            np.testing.assert_allclose(tensor, own[key], atol=1e-5)


def test_a_turn_that_does_not_learn_leaves_no_trace_in_the_next(engine: Engine) -> None:
    answer(engine, PROMPT, "plain")
    expected = answer(engine, PROMPT, "plain")
    answer(engine, PROMPT, "mixed")
    for event in engine.turn(TurnRequest(PROMPT[::-1], PARAMS, "mixed", learn=False)):
        assert event
    assert answer(engine, PROMPT, "mixed") == expected
