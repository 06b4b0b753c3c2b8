"""Laws of text files: how they are read, cut into documents, and encoded."""

from __future__ import annotations

import lzma

import pytest
from engines import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.corpus import documents, encode_documents, read_text
from fednl_runtime.errors import RequestError
from fednl_runtime.tokenizer import END_OF_TEXT

LINES = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1), min_size=1).map(
    "\n".join
)


def test_a_file_reads_the_same_plain_and_compressed(tmp_path):
    text = "naïve €5\n\n日本\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.txt.xz") == text


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xe2\x82")
    assert read_text(tmp_path / "a.txt") == "caf\ufffd \ufffd"


@pytest.mark.parametrize("name", ["none.txt", "folder", "damaged.xz", "cut.xz"])
def test_a_file_that_cannot_be_read_is_refused_by_name(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged.xz").write_bytes(b"this is not xz")
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"a" * 1000)[:-20])
    with pytest.raises(RequestError, match=f"{name} cannot be read"):
        read_text(tmp_path / name)


@given(st.lists(LINES.filter(str.strip), max_size=5))
def test_documents_are_what_stands_between_the_markers(parts):
    assert documents(f"\n{END_OF_TEXT}\n".join(parts)) == parts


@pytest.mark.parametrize(
    "text",
    [
        f"one\n{END_OF_TEXT}\ntwo\n{END_OF_TEXT}",
        f"{END_OF_TEXT}\none\n{END_OF_TEXT}\n{END_OF_TEXT}\ntwo",
        f"one\r\n{END_OF_TEXT}\r\ntwo\r\n",
        f"\n\none\n\n\n{END_OF_TEXT}\n \n{END_OF_TEXT}\ntwo\n",
    ],
)
def test_markers_at_the_ends_in_a_row_or_in_windows_files_leave_no_trace(text):
    assert documents(text) == ["one", "two"]


def test_a_marker_inside_a_line_is_text():
    assert documents(f"see {END_OF_TEXT} here") == [f"see {END_OF_TEXT} here"]
    tokens = encode_documents(TOKENIZER, f"see {END_OF_TEXT} here")
    assert (tokens == TOKENIZER.end_of_text).nonzero()[0].tolist() == [len(tokens) - 1]


def test_every_document_is_followed_by_the_end_of_text_token():
    tokens = encode_documents(TOKENIZER, f"the hall\n{END_OF_TEXT}\n€\n")
    end = TOKENIZER.end_of_text
    assert tokens.tolist() == [*TOKENIZER.encode("the hall"), end, *TOKENIZER.encode("€"), end]


@pytest.mark.parametrize("text", ["", "\n \n", f"{END_OF_TEXT}\n{END_OF_TEXT}\n"])
def test_a_text_of_nothing_has_no_tokens(text):
    assert encode_documents(TOKENIZER, text).shape == (0,)
