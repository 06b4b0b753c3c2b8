"""Laws of conversations: the longest committed prefix wins, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.errors import SnapshotNotFoundError
from fednl_runtime.history import Mark, Start, digest, find_start

TURNS = [("Q: one\n", "A: 1\n"), ("Q: two\n", "A: 22\n"), ("Q: three\n", "A: 333\n")]


def talk(turns: list[tuple[str, str]], anchor: int = 0) -> list[Mark]:
    """The marks of a conversation that began at version `anchor`."""
    marks, said = [], b""
    for version, (question, answer) in enumerate(turns, anchor + 1):
        read = said + question.encode()
        said = read + answer.encode()
        marks.append(
            Mark(
                version=version,
                content=version,
                parent=version - 1,
                anchor=anchor,
                length=len(said),
                digest=digest(said),
                prompt_length=len(read),
                prompt_digest=digest(read),
            )
        )
    return marks


def text(turns: list[tuple[str, str]], question: str) -> bytes:
    return "".join(map("".join, turns)).encode() + question.encode()


MARKS = talk(TURNS)


@pytest.mark.parametrize("mode", ["auto", "history"])
def test_a_history_goes_on_from_the_head(mode):
    start = find_start(MARKS[-1], MARKS, text(TURNS, "Q: four\n"), mode)
    assert (start.mark.version, start.skip) == (3, len(text(TURNS, "")))


@pytest.mark.parametrize("mode", ["auto", "history"])
def test_an_edited_message_goes_back_to_what_came_before_it(mode):
    start = find_start(MARKS[-1], MARKS, text(TURNS[:1], "Q: 2, please\n"), mode)
    assert (start.mark.version, start.anchor, start.skip) == (1, 0, len(text(TURNS[:1], "")))


@pytest.mark.parametrize("mode", ["auto", "history"])
def test_a_regenerated_answer_goes_back_to_before_its_question(mode):
    assert find_start(MARKS[-1], MARKS, text(TURNS[:2], "Q: three\n"), mode).mark.version == 2


@pytest.mark.parametrize("mode", ["auto", "history"])
def test_the_first_answer_can_be_regenerated_on_top_of_an_old_memory(mode):
    old = Mark(version=7, content=7, anchor=6)
    marks = [old, *talk(TURNS[:1], anchor=7)]
    assert find_start(marks[-1], marks, TURNS[0][0].encode(), mode) == Start(old, 7)


@pytest.mark.parametrize("answer", ["A: 1", "A: one\n", ""])
def test_a_first_answer_that_comes_back_changed_is_not_learnt_on_top_of_itself(answer):
    old = Mark(version=7, content=7, anchor=6)
    marks = [old, *talk(TURNS[:2], anchor=7)]
    assert find_start(marks[-1], marks, text([(TURNS[0][0], answer)], "Q: two\n"), "auto") == Start(old, 7)


def test_a_conversation_that_began_with_nothing_is_repeated_by_nothing_only():
    marks = talk([("", "A: 1\n")])
    assert find_start(marks[-1], marks, b"", "auto") == Start(Mark(), 0)
    assert find_start(marks[-1], marks, b"Q: one\n", "auto") == Start(marks[-1], 1)


def test_a_history_that_matches_nothing_follows_in_mode_auto_and_starts_over_in_mode_history():
    new = text([], "Q: something else\n")
    assert find_start(MARKS[-1], MARKS, new, "auto") == Start(MARKS[-1], 3)
    assert find_start(MARKS[-1], MARKS, new, "history") == Start(Mark(), 0)


def test_a_prompt_that_is_to_follow_follows_whatever_it_says():
    assert find_start(MARKS[-1], MARKS, text(TURNS, "Q: four\n"), "append") == Start(MARKS[-1], 3)


def test_another_conversation_of_the_session_is_not_gone_back_to():
    marks = [*MARKS, *talk([("Q: new\n", "A: yes\n")], anchor=3)]
    assert find_start(marks[-1], marks, text(TURNS, "Q: four\n"), "auto").mark.version == 4


def test_a_match_never_splits_a_character():
    euro = "€".encode()
    half = dataclasses.replace(MARKS[0], length=2, digest=digest(euro[:2]))
    assert find_start(half, [half], euro + b" and more", "auto").skip == 0


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=5), st.text(max_size=8))
def test_whatever_was_said_the_longest_prefix_is_found(turns, question):
    marks = talk(turns)
    start = find_start(marks[-1], marks, text(turns, question), "history")
    assert start.skip == len(text(turns, ""))


def test_a_conversation_whose_beginning_is_not_kept_is_never_begun_with_an_empty_memory():
    kept = talk(TURNS, anchor=4)[1:]
    new = text([], "Q: something else\n")
    assert find_start(kept[-1], kept, new, "auto") == Start(kept[-1], kept[-1].version)
    assert find_start(kept[-1], kept, TURNS[0][0].encode(), "auto") == Start(kept[-1], kept[-1].version)
    with pytest.raises(SnapshotNotFoundError, match="Version 4"):
        find_start(kept[-1], kept, new, "history")
