"""Laws of the text stream: pieces join to the whole text, whatever the token boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.text import TextStream, unfinished

LETTERS = st.text("ab€😀", max_size=12)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)


@st.composite
def pieces_of(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut at arbitrary places, empty pieces included."""
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def cut_by_hand(text: str, stop: list[str]) -> str:
    """The text before the first stop string to be complete, reading one character at a time."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def collect(stream: TextStream, pieces: list[bytes]) -> str:
    return "".join([*map(stream.push, pieces), stream.finish()])


@given(pieces_of(LETTERS.map(str.encode)), STOPS)
def test_pieces_join_to_the_text_cut_at_the_first_stop_string(pieces: list[bytes], stop: list[str]) -> None:
    assert collect(TextStream(stop), pieces) == cut_by_hand(b"".join(pieces).decode(), stop)


@given(pieces_of(st.binary(max_size=20) | LETTERS.map(lambda t: t.encode()[1:])))
def test_bytes_that_are_not_utf8_decode_as_if_they_came_at_once(pieces: list[bytes]) -> None:
    assert collect(TextStream(), pieces) == b"".join(pieces).decode("utf-8", "replace")


@given(st.binary(max_size=12) | LETTERS.map(str.encode), st.data())
def test_prompt_and_answer_texts_join_wherever_the_prompt_ends(data: bytes, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    prompt, tail = data[:cut], unfinished(data[:cut])
    shown = prompt[: len(prompt) - len(tail)].decode("utf-8", "replace")
    assert shown + collect(TextStream(tail=tail), [data[cut:]]) == data.decode("utf-8", "replace")


@given(LETTERS, STOPS)
def test_only_a_suffix_that_begins_a_stop_string_is_withheld(text: str, stop: list[str]) -> None:
    stream = TextStream(stop)
    shown = stream.push(text.encode())
    held = text[len(shown) :]
    assert stream.stopped or held == "" or any(s.startswith(held) and s != held for s in stop)


def test_an_unfinished_character_is_withheld_until_it_is_whole() -> None:
    stream = TextStream()
    assert [stream.push(b"\xe2"), stream.push(b"\x82"), stream.push(b"\xac!")] == ["", "", "€!"]


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(["END"])
    assert [stream.push(b"one E"), stream.push(b"ND two"), stream.push(b"three"), stream.finish()] == [
        "one ",
        "",
        "",
        "",
    ]
    assert stream.stopped


@pytest.mark.parametrize(
    ("data", "tail"),
    [(b"", b""), (b"abc", b""), ("€".encode(), b""), (b"a\xe2\x82", b"\xe2\x82"), (b"\xf0\x9f\x98", b"\xf0\x9f\x98")],
)
def test_unfinished_finds_the_bytes_that_wait_for_more(data: bytes, tail: bytes) -> None:
    assert unfinished(data) == tail
