"""What a journal is told of sessions, and rules that change while turns run."""

from __future__ import annotations

import numpy as np
import pytest
from engines import CONFIG, NO_END, TOKENIZER, running_engine
from models import random_params

from fednl_runtime.errors import SessionNotFoundError, StoreError
from fednl_runtime.export.weights import stored
from fednl_runtime.records import Settings
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import SessionKey
from fednl_runtime.turn import TokenEvent, TurnRequest

ANNA = SessionKey("", "anna")
RULES = {n: v for n, v in stored(random_params(CONFIG, 5)).items() if n.startswith("rule.")}
PROMPT = tuple(TOKENIZER.encode("the thing on the hill"))


class Notebook:
    """A journal in memory, which can be made to fail."""

    def __init__(self) -> None:
        self.texts: list[tuple[SessionKey, tuple[int, ...]]] = []
        self.forgotten: list[SessionKey] = []
        self.broken = False

    def record(self, key: SessionKey, tokens: tuple[int, ...]) -> None:
        self.texts.append((key, tokens))

    def forget(self, key: SessionKey) -> None:
        if self.broken:
            raise StoreError("The disk is full.")
        self.forgotten.append(key)


@pytest.fixture(name="notebook")
def notebook_fixture():
    return Notebook()


@pytest.fixture(name="engine")
def engine_fixture(notebook):
    with running_engine(journal=notebook) as engine:
        yield engine


def turn(engine, **fields):
    params = SamplingParams(max_tokens=3, temperature=0, logit_bias=NO_END)
    events = list(engine.turn(TurnRequest(**{"prompt": PROMPT, "params": params, "session_id": "anna", **fields})))
    return tuple(event.token for event in events if isinstance(event, TokenEvent))


def test_a_committed_turn_is_recorded_prompt_and_answer(engine, notebook):
    answer = turn(engine)
    assert notebook.texts == [(ANNA, (*PROMPT, *answer))]


@pytest.mark.parametrize("fields", [{"session_id": None}, {"learn": False}, {"learn": "dry_run"}])
def test_a_turn_that_commits_nothing_is_not_recorded(engine, notebook, fields):
    turn(engine, **fields)
    assert notebook.texts == []


def test_a_turn_that_is_rolled_back_is_not_recorded(engine, notebook):
    events = engine.turn(TurnRequest(PROMPT, session_id="anna"))
    next(events)
    events.close()
    assert notebook.texts == []


def test_a_session_whose_sync_is_off_is_not_recorded(engine, notebook):
    engine.sessions.create(ANNA, Settings(sync=False))
    turn(engine)
    assert notebook.texts == []


def test_turning_sync_off_forgets_what_was_recorded(engine, notebook):
    turn(engine)
    engine.sessions.configure(ANNA, frozen=True)
    assert notebook.forgotten == []
    engine.sessions.configure(ANNA, sync=False)
    assert notebook.forgotten == [ANNA]


@pytest.mark.parametrize("act", ["delete", "reset"])
def test_a_deleted_or_reset_session_is_forgotten(engine, notebook, act):
    turn(engine)
    getattr(engine.sessions, act)(ANNA)
    assert notebook.forgotten == [ANNA]


def test_an_expired_session_is_forgotten(engine, notebook):
    engine.sessions.create(ANNA, Settings(ttl_s=-1))
    engine.sessions.sweep()
    assert notebook.forgotten == [ANNA]


def test_a_session_stays_if_its_text_cannot_be_forgotten(engine, notebook):
    turn(engine)
    notebook.broken = True
    with pytest.raises(StoreError):
        engine.sessions.delete(ANNA)
    assert engine.sessions.get(ANNA).head.version == 1
    notebook.broken = False
    engine.sessions.delete(ANNA)
    with pytest.raises(SessionNotFoundError):
        engine.sessions.get(ANNA)


def logprobs(engine):
    return engine.score(PROMPT * 3)


def test_rules_apply_to_the_next_turn_and_none_are_the_models_own(engine):
    own = logprobs(engine)
    engine.use_rules(RULES)
    other = logprobs(engine)
    assert np.nanmax(np.abs(own - other)) > 1e-3
    engine.use_rules({})
    np.testing.assert_array_equal(logprobs(engine), own)


def test_a_turn_that_runs_keeps_the_rules_it_began_with(engine):
    params = SamplingParams(max_tokens=60, temperature=0, logit_bias=NO_END)
    request = TurnRequest(PROMPT, params)
    tokens = [e.token for e in engine.turn(request) if isinstance(e, TokenEvent)]
    engine.backend.delay_s = 0.001
    events = engine.turn(request)
    found = [next(e.token for e in events if isinstance(e, TokenEvent))]
    engine.use_rules(RULES)
    changed = [e.token for e in engine.turn(request) if isinstance(e, TokenEvent)]
    found += [e.token for e in events if isinstance(e, TokenEvent)]
    assert found == tokens
    assert changed != tokens


def test_rules_that_are_refused_change_nothing(engine, monkeypatch):
    own = logprobs(engine)
    monkeypatch.setattr(engine.backend, "with_rules", lambda rules: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.use_rules(RULES)
    np.testing.assert_array_equal(logprobs(engine), own)
