"""Laws of the sessions that are ready in memory: bounded by bytes, the least recently used go first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import TINY

from fednl_runtime.resident import Resident
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState

STATE = MemoryState.zeros(TINY)
LOGITS = np.zeros(TINY.vocab_size, np.float32)


def key(number: int) -> SessionKey:
    return SessionKey("owner", str(number))


def session(number: int, logits: bool = True) -> Session:
    return Session(key(number), STATE, 1, LOGITS if logits else None)


ONE = session(0).nbytes


def filled(numbers: list[int], room: int) -> Resident:
    resident = Resident(room * ONE)
    for number in numbers:
        resident.put(key(number), 1, session(number))
    return resident


def here(resident: Resident) -> list[int]:
    return [number for number in range(9) if resident.holds(key(number), 1)]


def test_the_least_recently_used_goes_first() -> None:
    resident = filled([0, 1, 2], room=3)
    assert resident.get(key(0), 1) is not None
    resident.put(key(3), 1, session(3))
    assert here(resident) == [0, 2, 3]
    assert resident.evictions == 1


def test_asking_whether_a_session_is_here_is_no_use_of_it() -> None:
    resident = filled([0, 1], room=2)
    assert resident.holds(key(0), 1)
    resident.put(key(2), 1, session(2))
    assert here(resident) == [1, 2]


def test_another_version_is_not_what_was_asked_for() -> None:
    resident = filled([0], room=1)
    assert resident.get(key(0), 2) is None
    resident.put(key(0), 2, session(0))
    assert resident.get(key(0), 1) is None
    assert resident.stats()["resident_bytes"] == ONE


@pytest.mark.parametrize("room", [0, 1])
def test_the_session_in_use_stays_whatever_its_size(room: int) -> None:
    assert here(filled([0, 1, 2], room)) == [2]


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 5), st.booleans()), max_size=40))
def test_the_bytes_are_those_of_the_sessions_that_are_here_and_within_the_room(
    steps: list[tuple[str, int, bool]],
) -> None:
    resident, kept = Resident(3 * ONE), dict[int, int]()
    for what, number, logits in steps:
        if what == "put":
            resident.put(key(number), 1, session(number, logits))
            kept[number] = session(number, logits).nbytes
        elif what == "drop":
            resident.drop(key(number))
        else:
            resident.get(key(number), 1)
        stats = resident.stats()
        assert stats["resident_bytes"] == sum(kept[number] for number in here(resident)) <= 3 * ONE
        assert stats["resident_sessions"] == len(here(resident))
