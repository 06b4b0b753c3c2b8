"""Laws of the engine: a turn is a transaction, any split is the same, neighbours do not matter."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import CONFIG, NO_END, TOKENIZER, NumpyBackend, committed, running_engine

from fednl_runtime.engine import Engine, EngineLimits, Outcome
from fednl_runtime.errors import (
    FednlError,
    MemoryBreachError,
    QueueFullError,
    RequestError,
    SessionBusyError,
    SessionLimitError,
    SessionNotFoundError,
    ShuttingDownError,
)
from fednl_runtime.guard import NormCaps
from fednl_runtime.reference import run
from fednl_runtime.sampling import SamplingParams, log_softmax
from fednl_runtime.scheduler import PIECE
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.slots import LONGEST
from fednl_runtime.state import MemoryState, state_bytes
from fednl_runtime.state_file import HEADER_BYTES
from fednl_runtime.turn import PromptEvent, TokenEvent, TurnReport, TurnRequest
from fednl_runtime.vault import StoreLimits

PROMPT = tuple(TOKENIZER.encode("hello the other day"))
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(name="engine")
def engine_fixture() -> Iterator[Engine]:
    with running_engine() as engine:
        yield engine


def ask(prompt: tuple[int, ...] = PROMPT, params: SamplingParams = GREEDY, **fields: Any) -> TurnRequest:
    return TurnRequest(prompt, params, **fields)


def answer(engine: Engine, request: TurnRequest) -> tuple[list[int], str, TurnReport]:
    """Tokens, text and report of a turn."""
    *events, report = engine.turn(request)
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    assert isinstance(report, TurnReport)
    return [e.token for e in tokens], "".join(e.text for e in tokens), report


def same_session(a: Session, b: Session) -> bool:
    """Whether two sessions hold the same memory, bit for bit."""
    assert a.logits is not None
    assert b.logits is not None
    return np.array_equal(a.logits, b.logits) and all(
        np.array_equal(t, b.state.tensors[name]) for name, t in a.state.tensors.items()
    )


def start(engine: Engine, request: TurnRequest) -> tuple[Any, queue.SimpleQueue[Any]]:
    """A turn that runs by itself, and its inbox."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return engine.start(request, inbox.put), inbox


def wait_for(inbox: queue.SimpleQueue[Any], kind: type) -> Any:
    """The first event of a kind."""
    while not isinstance(event := inbox.get(timeout=60), kind):
        pass
    return event


def test_a_turn_computes_what_the_reference_computes(engine: Engine) -> None:
    tokens, text, report = answer(engine, ask(session_id="a"))
    logits, state = run(engine.backend.params, CONFIG, np.array([[*PROMPT, *tokens]]), MemoryState.zeros(CONFIG))
    assert logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens
    assert text == TOKENIZER.decode(tokens)
    session = committed(engine, "a")
    np.testing.assert_array_equal(session.logits, logits[0, -1])
    for name, tensor in state.tensors.items():
        np.testing.assert_array_equal(session.state.tensors[name], tensor)
    assert report.tokens_seen == len(PROMPT) + len(tokens) == session.tokens_seen


def test_calls_never_cross_a_segment_and_each_token_is_read_once(engine: Engine) -> None:
    answer(engine, ask(session_id="a"))
    answer(engine, ask(session_id="a"))
    calls = engine.backend.calls
    assert [start for start, _ in calls] == [0, *itertools.accumulate(n for _, n in calls)][:-1]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, len(PROMPT)])
def test_a_prompt_cut_into_two_turns_leaves_the_same_session(engine: Engine, cut: int) -> None:
    silent = SamplingParams(max_tokens=0)
    if cut:
        answer(engine, ask(PROMPT[:cut], silent, session_id="two"))
    two, *_ = answer(engine, ask(PROMPT[cut:], session_id="two"))
    one, *_ = answer(engine, ask(session_id="one"))
    assert one == two
    assert same_session(committed(engine, "one"), committed(engine, "two"))


def test_an_empty_prompt_goes_on_from_the_last_logits(engine: Engine) -> None:
    whole, *_ = answer(engine, ask(session_id="one"))
    first, *_ = answer(engine, ask(PROMPT, SamplingParams(temperature=0, max_tokens=2), session_id="two"))
    rest, _, report = answer(engine, ask((), SamplingParams(temperature=0, max_tokens=3), session_id="two"))
    assert [*first, *rest] == whole
    assert report.prompt_tokens == 0
    assert report.surprise is None


def test_an_empty_prompt_of_a_fresh_session_is_the_end_of_text(engine: Engine) -> None:
    assert answer(engine, ask(()))[0] == answer(engine, ask((TOKENIZER.end_of_text,)))[0]


def test_a_turn_that_does_not_learn_leaves_the_session_as_it_was(engine: Engine) -> None:
    answer(engine, ask(session_id="a"))
    before = committed(engine, "a")
    first, _, report = answer(engine, ask(session_id="a", learn=False))
    again, *_ = answer(engine, ask(session_id="a", learn=False))
    assert first == again
    assert committed(engine, "a").state is before.state
    assert (report.version, report.tokens_seen, report.learned) == (1, before.tokens_seen, False)
    assert report.update_norm == 0


def test_a_turn_that_learns_reports_what_changed(engine: Engine) -> None:
    _, _, report = answer(engine, ask(session_id="a"))
    assert report.learned
    assert report.update_norm > 0
    assert report.version == 1
    assert report.state_bytes == engine.state_bytes == state_bytes(CONFIG)


def test_a_turn_without_a_session_keeps_nothing(engine: Engine) -> None:
    first, _, report = answer(engine, ask())
    assert answer(engine, ask())[0] == first
    assert (report.session_id, report.version, report.tokens_seen, report.learned) == (None, 0, 0, False)


@pytest.mark.parametrize("events", [0, 1, 4, 6])
def test_closing_the_iterator_rolls_back_at_any_event(engine: Engine, events: int) -> None:
    answer(engine, ask(session_id="a"))
    before = committed(engine, "a")
    turn = engine.turn(ask(session_id="a"))
    list(itertools.islice(turn, events))
    turn.close()  # type: ignore[attr-defined]
    assert committed(engine, "a").state is before.state
    assert answer(engine, ask(session_id="a"))[2].version == 2


def test_a_turn_closed_before_it_runs_is_never_computed(engine: Engine) -> None:
    engine.backend.delay_s = 0.01
    turns = [start(engine, ask(session_id="a")) for _ in range(3)]
    for turn, _ in turns[1:]:
        turn.close()
    turns[0][0].commit(wait_for(turns[0][1], Outcome))
    engine.backend.delay_s = 0
    assert answer(engine, ask(session_id="a"))[2].version == 2
    assert all(inbox.empty() for _, inbox in turns[1:])


def test_closing_stops_the_work_within_a_step(engine: Engine) -> None:
    engine.backend.delay_s = 0.01
    turn, inbox = start(engine, ask(PROMPT, SamplingParams(max_tokens=500, logit_bias=NO_END), session_id="a"))
    wait_for(inbox, TokenEvent)
    turn.close()
    done = len(engine.backend.calls)
    answer(engine, ask((1,), SamplingParams(max_tokens=0)))
    assert len(engine.backend.calls) <= done + 3


def test_an_error_of_the_backend_rolls_back_and_the_engine_goes_on(engine: Engine) -> None:
    engine.backend.fail_at = len(PROMPT) + 2
    with pytest.raises(RuntimeError, match="broke"):
        answer(engine, ask(session_id="a"))
    with pytest.raises(SessionNotFoundError):
        committed(engine, "a")
    engine.backend.fail_at = None
    assert answer(engine, ask(session_id="a"))[2].version == 1


def test_a_memory_beyond_its_cap_is_discarded() -> None:
    engine = Engine(NumpyBackend(), TOKENIZER, caps=NormCaps(token=1e-6))
    with pytest.raises(MemoryBreachError, match="above 1e-06"):
        answer(engine, ask(session_id="a"))
    with pytest.raises(SessionNotFoundError):
        committed(engine, "a")
    engine.shutdown()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_memory_that_is_not_finite_is_discarded(engine: Engine) -> None:
    answer(engine, ask(session_id="a"))
    engine.backend.params = {**engine.backend.params, "layers.0.w_in": np.full((30, 6), np.nan, np.float32)}
    with pytest.raises(MemoryBreachError, match="not finite"):
        answer(engine, ask(session_id="a"))
    assert committed(engine, "a").version == 1


def test_interleaved_sessions_answer_as_if_alone() -> None:
    prompts = {name: tuple(TOKENIZER.encode(f"{name} the {name * 9}")) for name in ("x", "yy", "zzz", "w")}
    with running_engine() as alone:
        expected = {name: answer(alone, ask(p, session_id=name))[0] for name, p in prompts.items()}
        memories = {name: committed(alone, name) for name in prompts}
    with running_engine(EngineLimits(slots=3)) as engine:
        engine.backend.delay_s = 0.001
        turns = {name: start(engine, ask(p, session_id=name)) for name, p in prompts.items()}
        for name, (turn, inbox) in turns.items():
            events = []
            while not isinstance(event := inbox.get(timeout=60), Outcome):
                events.append(event)
            turn.commit(event)
            assert [e.token for e in events if isinstance(e, TokenEvent)] == expected[name]
        for name in prompts:
            assert same_session(committed(engine, name), memories[name])


def test_a_long_prompt_stalls_a_neighbour_for_no_more_than_one_segment(engine: Engine) -> None:
    engine.backend.delay_s = 0.002
    long, long_inbox = start(engine, ask(PROMPT * 30, SamplingParams(max_tokens=0)))
    wait_for(long_inbox, PromptEvent)
    answer(engine, ask((1, 2), SamplingParams(max_tokens=3)))
    calls = list(engine.backend.calls)
    own = [i for i, call in enumerate(calls) if call in ((0, 2), (2, 1), (3, 1), (4, 1))]
    first, *later = [b - a - 1 for a, b in itertools.pairwise(own)]
    assert first <= 2, "choosing the first token is a step of its own"
    assert max(later) <= 1
    long.close()


def test_beside_a_turn_that_chooses_tokens_a_prompt_is_read_in_short_pieces() -> None:
    silent = ask(PROMPT * 30, SamplingParams(max_tokens=0), session_id="long")
    with running_engine(segment=200) as alone:
        answer(alone, silent)
        assert max(length for _, length in alone.backend.calls) == LONGEST
        expected = committed(alone, "long")
    with running_engine(segment=200) as engine:
        engine.backend.delay_s = 0.002
        neighbour, inbox = start(engine, ask((1,), SamplingParams(max_tokens=12, logit_bias=NO_END)))
        wait_for(inbox, TokenEvent)
        answer(engine, silent)
        wait_for(inbox, Outcome)
        neighbour.close()
        calls = [length for _, length in engine.backend.calls]
        last = max(i for i, length in enumerate(calls) if length == 1)
        assert PIECE in calls[:last]
        assert max(calls[:last]) == PIECE
        assert max(calls[last:]) == LONGEST
        assert same_session(committed(engine, "long"), expected)


def test_two_turns_on_one_session_run_one_after_the_other(engine: Engine) -> None:
    engine.backend.delay_s = 0.002
    first, second = start(engine, ask(session_id="a")), start(engine, ask(session_id="a"))
    assert first[0].commit(wait_for(first[1], Outcome)).version == 1
    assert second[0].commit(wait_for(second[1], Outcome)).version == 2


def test_a_session_that_stays_busy_is_refused_after_a_bounded_wait() -> None:
    with running_engine(EngineLimits(busy_wait_s=0.05)) as engine:
        turn, inbox = start(engine, ask(session_id="a"))
        outcome = wait_for(inbox, Outcome)
        with pytest.raises(SessionBusyError, match="'a'"):
            answer(engine, ask(session_id="a"))
        assert answer(engine, ask(session_id="a", learn=False))[2].version == 0
        turn.commit(outcome)
        assert answer(engine, ask(session_id="a"))[2].version == 2


def test_a_full_queue_is_refused_at_once() -> None:
    with running_engine(EngineLimits(slots=1, queue=2)) as engine:
        engine.backend.delay_s = 0.01
        running, inbox = start(engine, ask(PROMPT, SamplingParams(max_tokens=200, logit_bias=NO_END)))
        wait_for(inbox, PromptEvent)
        waiting = [start(engine, ask())[0] for _ in range(2)]
        with pytest.raises(QueueFullError):
            engine.start(ask(), print)
        for turn in (running, *waiting):
            turn.close()


def test_sessions_beyond_the_byte_budget_are_refused_and_deleting_makes_room() -> None:
    one = state_bytes(CONFIG) + 4 * CONFIG.vocab_size + HEADER_BYTES
    with running_engine(EngineLimits(store=StoreLimits(resident_bytes=2 * one, versions=1))) as engine:
        for name in ("a", "b"):
            answer(engine, ask(session_id=name))
        with pytest.raises(SessionLimitError):
            answer(engine, ask(session_id="c"))
        assert answer(engine, ask(session_id="a"))[2].version == 2
        engine.sessions.delete(SessionKey("", "a"))
        assert answer(engine, ask(session_id="c"))[2].version == 1


def test_a_session_deleted_while_a_turn_runs_stays_deleted(engine: Engine) -> None:
    answer(engine, ask(session_id="a"))
    turn, inbox = start(engine, ask(session_id="a"))
    outcome = wait_for(inbox, Outcome)
    engine.sessions.delete(SessionKey("", "a"))
    with pytest.raises(SessionNotFoundError, match="deleted while"):
        turn.commit(outcome)
    with pytest.raises(SessionNotFoundError):
        committed(engine, "a")
    assert answer(engine, ask(session_id="a"))[2].version == 1


def test_shutdown_ends_every_turn_with_an_error() -> None:
    with running_engine(EngineLimits(slots=1)) as engine:
        engine.backend.delay_s = 0.01
        inboxes = [start(engine, ask(PROMPT, SamplingParams(max_tokens=300, logit_bias=NO_END)))[1] for _ in range(3)]
        wait_for(inboxes[0], PromptEvent)
        engine.shutdown()
        for inbox in inboxes:
            wait_for(inbox, ShuttingDownError)
        with pytest.raises(ShuttingDownError):
            answer(engine, ask())


def test_score_is_the_surprise_of_the_reference(engine: Engine) -> None:
    scores = engine.score(PROMPT)
    logits, _ = run(engine.backend.params, CONFIG, np.array([PROMPT]), MemoryState.zeros(CONFIG), np.array([[1, 0]]))
    rows = log_softmax(logits[0, :-1])
    assert np.isnan(scores[0])
    np.testing.assert_allclose(scores[1:], -rows[np.arange(len(rows)), PROMPT[1:]], rtol=1e-4)


def test_scoring_in_a_session_scores_the_first_token_and_changes_nothing(engine: Engine) -> None:
    answer(engine, ask(session_id="a"))
    before = committed(engine, "a")
    assert np.isfinite(engine.score(PROMPT, "a")).all()
    assert committed(engine, "a").state is before.state


def test_the_reported_surprise_is_the_mean_over_the_prompt(engine: Engine) -> None:
    report = answer(engine, ask(learn=False))[2]
    assert report.surprise == pytest.approx(np.nanmean(engine.score(PROMPT)))


def test_logprobs_of_the_answer_are_the_scores_of_reading_it(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    events = [e for e in engine.turn(ask(params=params, learn=False)) if isinstance(e, TokenEvent)]
    scores = engine.score((*PROMPT, *(e.token for e in events)))[-5:]
    np.testing.assert_allclose([e.logprob for e in events], -scores, rtol=1e-4)
    assert all(e.top[0] == (e.token, e.logprob) for e in events)


def test_a_stop_string_ends_the_answer_before_it_and_its_tokens_were_read(engine: Engine) -> None:
    text = answer(engine, ask(session_id="a"))[1]
    stop = text[2]
    tokens, cut, report = answer(
        engine, ask(params=SamplingParams(temperature=0, max_tokens=5, stop=(stop,)), session_id="b")
    )
    assert cut == text[: text.index(stop)]
    assert report.finish_reason == "stop"
    assert report.tokens_seen == len(PROMPT) + len(tokens)


def test_the_end_of_text_token_ends_the_answer(engine: Engine) -> None:
    forced = SamplingParams(temperature=0, max_tokens=5, logit_bias=((TOKENIZER.end_of_text, 100.0),))
    tokens, text, report = answer(engine, ask(params=forced))
    assert (tokens, text, report.finish_reason) == ([TOKENIZER.end_of_text], "", "stop")


def test_a_prompt_that_ends_inside_a_character_is_completed_by_the_answer(engine: Engine) -> None:
    euro = TOKENIZER.encode("€")
    forced = SamplingParams(temperature=0, max_tokens=1, logit_bias=((euro[-1], 100.0),))
    assert answer(engine, ask((*PROMPT, euro[0]), forced))[1] == "€"


def test_a_character_may_be_split_between_two_turns(engine: Engine) -> None:
    euro = TOKENIZER.encode("€")
    half = SamplingParams(temperature=0, max_tokens=1, logit_bias=((euro[0], 100.0),))
    rest = SamplingParams(temperature=0, max_tokens=1, logit_bias=((euro[1], 100.0),))
    answer(engine, ask(params=half, session_id="a"))
    assert answer(engine, ask((), rest, session_id="a"))[1] == "€"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ask((-1,)), "prompt"),
        (ask((CONFIG.vocab_size,)), "prompt"),
        (ask((1,) * 11), "prompt"),
        (ask((1,), SamplingParams(max_tokens=8)), "max_tokens"),
        (ask((1,), SamplingParams(max_tokens=1, logit_bias=((CONFIG.vocab_size, 1.0),))), "logit_bias"),
    ],
)
def test_what_the_model_cannot_serve_is_refused_by_its_name(request_: TurnRequest, param: str) -> None:
    with running_engine(EngineLimits(max_prompt_tokens=10, max_tokens=7)) as engine:
        with pytest.raises(RequestError) as caught:
            answer(engine, request_)
        assert caught.value.param == param


def test_many_threads_on_few_sessions_lose_no_version(engine: Engine) -> None:
    def work(name: str) -> None:
        for _ in range(5):
            answer(engine, ask((1, 2), SamplingParams(max_tokens=1), session_id=name))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [committed(engine, name).version for name in "ab"] == [10, 10]


def test_errors_of_the_engine_are_sentences() -> None:
    for error in (SessionBusyError, QueueFullError, SessionLimitError, ShuttingDownError):
        assert issubclass(error, FednlError)
