"""Laws of retries: a turn that was committed is answered again, word for word, and teaches nothing twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import NO_END, TOKENIZER, NumpyBackend, committed, running_engine
from hypothesis import given
from hypothesis import strategies as st
from turns import TEXT, ask, head, outcome_of, say, started, tokens_of

from fednl_runtime.engine import RETRY_S, Engine, EngineLimits
from fednl_runtime.errors import AnswerGoneError, RetryMismatchError
from fednl_runtime.receipt import pack, unpack
from fednl_runtime.records import RECEIPT_S
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import SessionKey
from fednl_runtime.turn import PromptEvent, Retry, TokenEvent, TurnReport
from fednl_runtime.vault import StoreLimits

KEYED = Retry("digest", "key")
SCORED = SamplingParams(seed=3, max_tokens=4, logprobs=3, logit_bias=NO_END)


@pytest.fixture(name="engine")
def engine_fixture() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def calls(engine: Engine) -> int:
    assert isinstance(engine.backend, NumpyBackend)
    return len(engine.backend.calls)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


@pytest.mark.parametrize(
    "fields", [{}, {"params": SCORED}, {"params": SCORED, "score_prompt": True}], ids=["plain", "logprobs", "echo"]
)
def test_a_retry_gets_the_same_events_and_report_and_learns_nothing(engine: Engine, fields: dict[str, Any]) -> None:
    say(engine)
    events, report = say(engine, retry=KEYED, **fields)
    before, done = committed(engine, "a"), calls(engine)
    again, replayed = say(engine, retry=KEYED, **fields)
    if "score_prompt" not in fields:
        events = [event for event in events if isinstance(event, TokenEvent)]
    assert again == events
    assert (replayed.replayed, report.replayed) == (True, False)
    assert {**vars(replayed), "replayed": False} == vars(report)
    assert calls(engine) == done
    assert committed(engine, "a").state is before.state


def test_a_key_is_answered_again_after_other_turns(engine: Engine) -> None:
    events, _ = say(engine, retry=KEYED)
    say(engine, retry=Retry("other", "other key"))
    again, report = say(engine, retry=KEYED)
    assert tokens_of(again) == tokens_of(events)
    assert (report.version, engine.sessions.get(SessionKey("", "a")).head.version) == (1, 2)


def test_a_key_whose_answer_went_with_its_version_is_refused_and_teaches_nothing() -> None:
    with running_engine(EngineLimits(store=StoreLimits(versions=2))) as engine:
        say(engine, retry=KEYED)
        for number in range(3):
            say(engine, retry=Retry("other", f"other {number}"))
        with pytest.raises(AnswerGoneError, match="version 1"):
            say(engine, retry=KEYED)
        with pytest.raises(RetryMismatchError):
            say(engine, retry=Retry("another", "key"))
        assert committed(engine, "a").version == 4


@pytest.mark.parametrize("retry", [KEYED, Retry("digest", again=True)])
def test_an_answer_too_long_to_keep_is_not_given_again_and_teaches_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, retry: Retry
) -> None:
    monkeypatch.setattr("fednl_runtime.engine.MAX_ANSWER", 100)
    say(engine, retry=Retry("digest", retry.key))
    with pytest.raises(AnswerGoneError, match="version 1"):
        say(engine, retry=retry)
    assert committed(engine, "a").version == 1


def test_a_key_used_for_another_request_is_refused(engine: Engine) -> None:
    say(engine, retry=KEYED)
    with pytest.raises(RetryMismatchError, match="another request"):
        say(engine, retry=Retry("another", "key"))
    assert committed(engine, "a").version == 1


def test_the_same_key_in_another_session_or_of_another_owner_is_another_turn(engine: Engine) -> None:
    say(engine, retry=KEYED)
    assert not say(engine, session_id="b", retry=KEYED)[1].replayed
    assert not say(engine, owner="other", retry=KEYED)[1].replayed


def test_a_new_key_is_a_new_turn_whatever_the_request(engine: Engine) -> None:
    say(engine, retry=KEYED)
    assert say(engine, retry=Retry("digest", "new"))[1].version == 2


def test_a_request_sent_again_without_a_key_is_answered_again_if_it_was_the_last(engine: Engine) -> None:
    say(engine, retry=Retry("first"))
    events, _ = say(engine, retry=Retry("second"))
    again, report = say(engine, retry=Retry("second", again=True))
    assert (tokens_of(again), report.replayed, report.version) == (tokens_of(events), True, 2)
    assert not say(engine, retry=Retry("first", again=True))[1].replayed


def test_the_same_request_not_sent_again_is_a_new_turn(engine: Engine) -> None:
    say(engine, retry=Retry("digest"))
    assert say(engine, retry=Retry("digest"))[1].version == 2


def test_a_turn_sent_again_after_it_was_undone_is_a_new_turn(engine: Engine) -> None:
    say(engine, retry=Retry("digest"))
    engine.sessions.rollback(SessionKey("", "a"))
    report = say(engine, retry=Retry("digest", again=True))[1]
    assert (report.replayed, report.version, report.parent_version) == (False, 3, 2)


@pytest.mark.parametrize(("seconds", "replayed"), [(RETRY_S - 60, True), (RETRY_S + 1, False)])
def test_a_request_without_a_key_is_remembered_for_some_minutes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float, replayed: bool
) -> None:
    say(engine, retry=Retry("digest"))
    later(monkeypatch, seconds)
    assert say(engine, retry=Retry("digest", again=True))[1].replayed == replayed


@pytest.mark.parametrize(("seconds", "replayed"), [(RECEIPT_S - 60, True), (RECEIPT_S + 1, False)])
def test_a_key_is_remembered_for_a_day(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float, replayed: bool
) -> None:
    say(engine, retry=KEYED)
    later(monkeypatch, seconds)
    assert say(engine, retry=KEYED)[1].replayed == replayed


@pytest.mark.parametrize("retry", [KEYED, Retry("digest", again=True)])
def test_a_retry_after_a_restart_is_answered_again(tmp_path: Path, retry: Retry) -> None:
    with running_engine(folder=tmp_path) as engine:
        events, report = say(engine, params=SCORED, score_prompt=True, retry=Retry("digest", retry.key))
    with running_engine(folder=tmp_path) as engine:
        again, replayed = say(engine, params=SCORED, score_prompt=True, retry=retry)
        assert again == events
        assert {**vars(replayed), "replayed": False} == vars(report)
        assert calls(engine) == 0


def test_a_retry_sent_while_the_turn_still_runs_waits_for_it(engine: Engine) -> None:
    engine.backend.delay_s = 0.005  # type: ignore[attr-defined]
    found: list[TurnReport] = []
    threads = [threading.Thread(target=lambda: found.append(say(engine, retry=KEYED)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(report.replayed for report in found) == [False, True, True, True]
    assert {report.version for report in found} == {1}


@pytest.mark.parametrize("learn", [False, "dry_run"])
def test_a_turn_that_keeps_nothing_is_never_answered_again(engine: Engine, learn: Any) -> None:
    say(engine, retry=KEYED)
    assert not say(engine, retry=KEYED, learn=learn)[1].replayed
    assert not say(engine, session_id=None, retry=KEYED)[1].replayed


def test_a_turn_that_was_rolled_back_has_no_receipt(engine: Engine) -> None:
    turn, inbox = started(engine, ask(retry=KEYED))
    outcome_of(inbox)
    turn.close()
    assert not say(engine, retry=KEYED)[1].replayed
    assert committed(engine, "a").version == 1


def test_a_retry_is_answered_before_the_version_it_counts_on_is_looked_at(engine: Engine) -> None:
    say(engine, retry=KEYED, expect_version=0)
    assert say(engine, retry=KEYED, expect_version=0)[1].replayed


def test_a_deleted_session_forgets_its_receipts(engine: Engine) -> None:
    say(engine, retry=KEYED)
    engine.sessions.delete(SessionKey("", "a"))
    assert not say(engine, retry=KEYED)[1].replayed


def test_a_turn_without_retry_leaves_no_receipt(engine: Engine) -> None:
    say(engine)
    assert engine.sessions.receipt(SessionKey("", "a"), None) is None


def test_a_replay_leaves_the_session_to_go_on_as_if_it_had_not_been(engine: Engine) -> None:
    for session_id in ("a", "b"):
        say(engine, session_id=session_id, retry=KEYED)
    say(engine, session_id="b", retry=KEYED)
    assert tokens_of(say(engine, session_id="a")[0]) == tokens_of(say(engine, session_id="b")[0])
    assert head(engine, "a") == head(engine, "b")


FLOATS = st.floats(allow_nan=False)
TOP = st.lists(st.tuples(st.integers(0, 9), FLOATS), max_size=2).map(tuple)
TOKEN_EVENTS = st.builds(
    TokenEvent, st.integers(0, 9), st.text(), st.integers(0, 9), st.none() | FLOATS, TOP, st.none() | st.just("stop")
)
PROMPT_EVENTS = st.builds(
    PromptEvent,
    st.lists(st.integers(0, 9)).map(tuple),
    st.lists(st.none() | FLOATS).map(tuple),
    st.lists(TOP).map(tuple),
)


@given(st.lists(TOKEN_EVENTS | PROMPT_EVENTS), FLOATS)
def test_what_was_packed_is_unpacked_as_it_was(events: list[PromptEvent | TokenEvent], surprise: float) -> None:
    report = TurnReport("a", 1, 0, 9, True, 0.5, surprise, 4, 3, 2, 1, "stop", persisted=True)
    again, replayed = unpack(pack(events, report))
    assert again == events
    assert {**vars(replayed), "replayed": False} == vars(report)


def test_the_tokens_of_the_text_are_more_than_a_segment() -> None:
    assert len(TOKENIZER.encode(TEXT)) > NumpyBackend().segment
