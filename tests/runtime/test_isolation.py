"""Sessions never meet, and of those who change one at the same time exactly one wins."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import NO_END, TOKENIZER, committed, running_engine, until
from turns import TEXT, ask, bits, head, outcome_of, say, started, tokens_of

from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.errors import (
    CancelledTurnError,
    FednlError,
    SessionExistsError,
    SessionNotFoundError,
    SnapshotNotFoundError,
    StoreError,
    VersionConflictError,
)
from fednl_runtime.guard import level
from fednl_runtime.onnx_backend import load
from fednl_runtime.records import Settings
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import SessionKey
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import Retry, TurnRequest
from fednl_runtime.vault import StoreLimits

KEY = SessionKey("", "a")
MODEL = Path(__file__).parents[2] / "runtime/models/hope.onnx"
NAMES = [f"s{i:02}" for i in range(16)]
WIDE = EngineLimits(slots=5, queue=32, store=StoreLimits(resident_bytes=1))
"""Several turns side by side, and a single session resident."""


@pytest.fixture(name="engine", params=["memory", "folder"])
def engine_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with running_engine(folder=tmp_path if request.param == "folder" else None) as engine:
        yield engine


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each action returned or raised, all begun at the same time; others than our errors are raised here."""
    barrier, found = threading.Barrier(len(actions)), queue.SimpleQueue[tuple[int, Any]]()

    def act(number: int, action: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            found.put((number, action()))
        except Exception as error:
            found.put((number, error))

    threads = [threading.Thread(target=act, args=item) for item in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    results = [result for _, result in sorted((found.get(timeout=1) for _ in actions), key=lambda pair: pair[0])]
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, FednlError):
            raise result
    return results


def texts(name: str) -> list[str]:
    """What a session reads in its three turns: its own words and a canary."""
    return [f"{name} is my name the canary-{name}", f"hello {name * 3}", f"{name} the end"]


def interleaved(engine: Engine, requests: Callable[[str, int], TurnRequest]) -> dict[str, list[Any]]:
    """Three turns of each of 16 sessions, a round of all of them at a time; the events of each session."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for turn in range(3):
        running = [(name, *started(engine, requests(name, turn))) for name in NAMES[turn:] + NAMES[:turn]]
        for name, handle, inbox in running:
            while not hasattr(event := inbox.get(timeout=60), "report"):
                assert not isinstance(event, Exception), event
                found[name].append(event)
            found[name].append(handle.commit(event).version)
    return found


def alone(engine: Engine, requests: Callable[[str, int], TurnRequest], name: str) -> list[Any]:
    """The same turns of one session."""
    found: list[Any] = []
    for turn in range(3):
        *events, report = engine.turn(requests(name, turn))
        found += [*events, report.version]  # type: ignore[union-attr]
    return found


def test_sixteen_sessions_side_by_side_are_each_as_if_alone(tmp_path: Path) -> None:
    def request(name: str, turn: int) -> TurnRequest:
        params = SamplingParams(seed=turn, max_tokens=5, logprobs=2, logit_bias=NO_END)
        return ask(texts(name)[turn], session_id=name, params=params, score_prompt=True)

    with running_engine(WIDE, folder=tmp_path) as crowded:
        found = interleaved(crowded, request)
        memories = {name: head(crowded, name) for name in NAMES}
    for name in reversed(NAMES):
        with running_engine() as engine:
            assert alone(engine, request, name) == found[name]
            assert head(engine, name) == memories[name]


@pytest.mark.parametrize(("slots", "bound"), [(1, 0.0), (5, 1e-5)])
def test_sixteen_sessions_of_the_shipped_model_are_each_as_if_alone(tmp_path: Path, slots: int, bound: float) -> None:
    # In a batch the model's kernels add in another order; one turn at a time, in whatever order, the bits are the same.
    backend = load(MODEL, threads=1)
    tokenizer = Tokenizer(backend.tokenizer_json)

    def request(name: str, turn: int) -> TurnRequest:
        prompt = tuple(tokenizer.encode(texts(name)[turn]))
        return TurnRequest(prompt, SamplingParams(seed=turn, max_tokens=6, logprobs=1), name)

    crowded = Engine(backend, tokenizer, dataclasses.replace(WIDE, slots=slots), folder=tmp_path)
    found = interleaved(crowded, request)
    memories = {name: committed(crowded, name) for name in NAMES}
    crowded.shutdown()
    quiet = Engine(backend, tokenizer)
    for name in reversed(NAMES):
        assert tokens_of(alone(quiet, request, name)) == tokens_of(found[name])
        own = committed(quiet, name)
        np.testing.assert_allclose(memories[name].logits, own.logits, atol=bound, rtol=bound)
        for tensor, expected in own.state.tensors.items():
            np.testing.assert_allclose(memories[name].state.tensors[tensor], expected, atol=bound, rtol=bound)
        if bound == 0:
            assert bits(memories[name]) == bits(own)
    quiet.shutdown()


def test_two_owners_of_the_same_name_never_see_each_other(engine: Engine) -> None:
    mine = [tokens_of(say(engine, text, owner="me")[0]) for text in texts("me")]
    with pytest.raises(SessionNotFoundError):
        engine.sessions.get(SessionKey("you", "a"))
    yours = [tokens_of(say(engine, text, owner="you", retry=Retry("d", "key"))[0]) for text in texts("you")[:1]]
    assert not say(engine, owner="me", retry=Retry("d", "key"))[1].replayed
    with running_engine() as other:
        assert [tokens_of(say(other, text)[0]) for text in texts("me")] == mine
        assert [tokens_of(say(other, text, session_id="b")[0]) for text in texts("you")[:1]] == yours
    engine.sessions.delete(SessionKey("you", "a"))
    assert committed(engine, "a", "me").version == 4


@pytest.mark.parametrize("learn", [False, "dry_run"])
def test_a_turn_that_keeps_nothing_leaves_everything_as_it_was(engine: Engine, learn: Any) -> None:
    say(engine)
    before, record, log = committed(engine, "a"), engine.sessions.get(KEY), engine.sessions.updates(KEY)
    memory = head(engine)
    events, report = say(engine, learn=learn, retry=Retry("d", "k"))
    assert committed(engine, "a").state is before.state
    assert head(engine) == memory
    assert (engine.sessions.get(KEY), engine.sessions.updates(KEY)) == (record, log)
    assert (report.learned, report.version) == (False, 1)
    assert (report.update_norm > 0) == (learn == "dry_run")
    assert tokens_of(events)


def test_a_turn_that_keeps_nothing_makes_no_session(engine: Engine) -> None:
    for learn in (False, "dry_run"):
        say(engine, learn=learn)
    assert engine.sessions.stats()["sessions"] == 0


def test_a_frozen_session_goes_on_and_its_slow_levels_stay(engine: Engine) -> None:
    say(engine)
    engine.sessions.configure(KEY, frozen=True)
    before = committed(engine, "a")
    report = say(engine, f"{TEXT} " * 4, max_tokens=9)[1]
    after = committed(engine, "a")
    changed = {
        name
        for name in before.state.tensors
        if not np.array_equal(after.state.tensors[name], before.state.tensors[name])
    }
    assert {level(name) for name in changed} == {"token", None}
    assert (report.update_norm, report.version) == (0, 2)
    engine.sessions.configure(KEY, frozen=False)
    assert say(engine, f"{TEXT} " * 4)[1].update_norm > 0


def test_of_two_commits_on_one_version_exactly_one_wins(engine: Engine) -> None:
    for version in range(1, 8):
        first, second = (started(engine, ask(f"turn {i}")) for i in range(2))
        outcome = outcome_of(first[1])
        engine.scheduler.close(first[0]._job)  # so that both run on the same version
        other = outcome_of(second[1])
        found = together(lambda f=first, o=outcome: f[0].commit(o), lambda s=second, o=other: s[0].commit(o))
        failed = [error for error in found if isinstance(error, FednlError)]
        assert [type(error) for error in failed] == [VersionConflictError]
        winner = outcome if found[1] is failed[0] else other
        assert winner.after is not None
        assert committed(engine, "a").version == version
        assert committed(engine, "a").state is winner.after.state


@pytest.mark.parametrize("action", ["rollback", "reset", "delete", "fork", "snapshot", "configure", "export"])
def test_a_commit_and_another_change_never_mix(engine: Engine, action: str) -> None:
    store = engine.sessions
    actions: dict[str, Callable[[], Any]] = {
        "rollback": lambda: store.rollback(KEY),
        "reset": lambda: store.reset(KEY),
        "delete": lambda: store.delete(KEY),
        "fork": lambda: store.fork(KEY, "b"),
        "snapshot": lambda: store.snapshot(KEY, "name"),
        "configure": lambda: store.configure(KEY, metadata={"a": "b"}),
        "export": lambda: store.export(KEY),
    }
    expected = ["rollback", "reset"]
    for _ in range(5):
        say(engine)
        before = head(engine)
        turn, inbox = started(engine, ask("another"))
        outcome = outcome_of(inbox)
        done, changed = together(lambda t=turn, o=outcome: t.commit(o), actions[action])
        assert not isinstance(changed, FednlError)
        if action == "delete":
            assert not isinstance(done, VersionConflictError)
            with pytest.raises(SessionNotFoundError):
                store.get(KEY)
            continue
        if isinstance(done, FednlError):
            assert isinstance(done, VersionConflictError)
            assert action in expected
        elif action not in expected:
            assert outcome.after is not None
            assert committed(engine, "a").state is outcome.after.state
        if action == "fork":
            assert head(engine, "b") in (before, head(engine))
            store.delete(SessionKey("", "b"))
        store.delete(KEY)
    assert store.stats()["sessions"] == 0
    assert store._vault.files.names() == []


def test_of_many_who_make_one_session_exactly_one_does(engine: Engine) -> None:
    say(engine)
    data = engine.sessions.export(KEY)
    for number in range(5):
        key = SessionKey("", f"new{number}")
        found = together(
            lambda k=key: engine.sessions.create(k, Settings()),
            lambda k=key: engine.sessions.fork(KEY, k.id),
            lambda k=key: engine.sessions.import_(k, data),
            lambda k=key: engine.sessions.create(k, Settings()),
        )
        failed = [error for error in found if isinstance(error, FednlError)]
        assert [type(error) for error in failed] == [SessionExistsError] * 3


def test_of_many_who_delete_a_session_exactly_one_does(engine: Engine) -> None:
    say(engine)
    found = together(*[lambda: engine.sessions.delete(KEY)] * 4)
    assert sorted(type(result).__name__ for result in found) == ["NoneType"] + ["SessionNotFoundError"] * 3


def test_forks_in_both_directions_do_not_wait_for_each_other(engine: Engine) -> None:
    for name in "ab":
        say(engine, session_id=name)
    a, b = SessionKey("", "a"), SessionKey("", "b")
    for number in range(20):
        found = together(
            lambda n=number: engine.sessions.fork(a, f"c{n}"),
            lambda n=number: engine.sessions.fork(b, f"c{n}"),
            lambda: engine.sessions.configure(a),
            lambda: engine.sessions.configure(b),
        )
        assert sum(isinstance(result, FednlError) for result in found) == 1
        assert head(engine, f"c{number}") in (head(engine, "a"), head(engine, "b"))


def test_changes_from_all_sides_leave_a_session_that_is_one_of_them(tmp_path: Path) -> None:
    limits = EngineLimits(store=StoreLimits(versions=3, resident_bytes=1), busy_wait_s=60)
    errors = (VersionConflictError, SessionNotFoundError, SessionExistsError, SnapshotNotFoundError)

    def many(action: Callable[[], Any]) -> Callable[[], None]:
        def act() -> None:
            for _ in range(12):
                with contextlib.suppress(errors):
                    action()

        return act

    with running_engine(limits, folder=tmp_path) as engine:
        store = engine.sessions
        found = together(
            many(lambda: say(engine, "one")),
            many(lambda: say(engine, "two", learn=False)),
            many(lambda: store.rollback(KEY)),
            many(lambda: store.fork(KEY, "b")),
            many(lambda: store.delete(SessionKey("", "b"))),
            many(lambda: say(engine, "three", session_id="b")),
            many(lambda: store.export(KEY)),
            many(lambda: store.sweep()),
        )
        assert found == [None] * 8
        names = {store._vault.files.name(*content) for content in store._vault.records.contents()}
        assert set(store._vault.files.names()) == names
        memories = {key: head(engine, key) for key in ("a",)}
        log = store.updates(KEY)
        assert [update.version for update in log] == list(range(1, len(log) + 1))
    with running_engine(limits, folder=tmp_path) as engine:
        assert {key: head(engine, key) for key in memories} == memories
        say(engine)


def test_a_turn_that_is_closed_while_it_commits_keeps_the_next_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, entered, go_on = engine.sessions.commit, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        entered.set()
        go_on.wait(60)
        commit(*args)

    monkeypatch.setattr(engine.sessions, "commit", slowly)
    turn, inbox = started(engine, ask(retry=Retry("d", "key")))
    outcome = outcome_of(inbox)
    thread = threading.Thread(target=turn.commit, args=(outcome,))
    thread.start()
    entered.wait(60)
    turn.close()  # its client has gone, and sends the same again
    again, again_inbox = started(engine, ask(retry=Retry("d", "key")))
    until(lambda: engine.scheduler.load()[1] == 1)
    go_on.set()
    thread.join(60)
    assert outcome_of(again_inbox).report.replayed
    again.close()
    assert committed(engine, "a").version == 1


def test_a_turn_that_was_closed_cannot_be_committed_and_one_is_committed_once(engine: Engine) -> None:
    turn, inbox = started(engine, ask())
    outcome = outcome_of(inbox)
    turn.close()
    with pytest.raises(CancelledTurnError):
        turn.commit(outcome)
    turn, inbox = started(engine, ask())
    outcome = outcome_of(inbox)
    found = together(*[lambda: turn.commit(outcome)] * 4)
    assert sum(isinstance(result, CancelledTurnError) for result in found) == 3
    assert committed(engine, "a").version == 1


def test_a_commit_after_the_engine_was_shut_down_fails_and_writes_nothing(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as engine:
        say(engine)
        turn, inbox = started(engine, ask())
        outcome = outcome_of(inbox)
        engine.shutdown()
        with running_engine(folder=tmp_path) as other:
            assert say(other)[1].version == 2
            memory = head(other)
            with pytest.raises(StoreError):
                turn.commit(outcome)
            other.sessions._vault.resident.drop(KEY)
            assert head(other) == memory


def test_canaries_of_one_session_are_in_no_file_of_another(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as engine:
        for name in ("mine", "yours"):
            engine.sessions.create(SessionKey(name, "a"), Settings(metadata={"canary": f"canary-{name}"}))
            say(engine, f"canary-{name}", owner=name, retry=Retry(f"canary-{name}"))
        for owner, other in (("mine", "yours"), ("yours", "mine")):
            assert f"canary-{other}".encode() not in engine.sessions.export(SessionKey(owner, "a"))
            receipt = engine.sessions.receipt(SessionKey(owner, "a"), None)
            assert receipt is not None
            assert receipt.digest == f"canary-{owner}"
        states = b"".join(path.read_bytes() for path in (tmp_path / "states").iterdir())
    assert b"canary" not in states
    assert b"mine" not in states
    assert TOKENIZER.encode("canary")
