"""Laws of the tokenizer: exact bytes both ways, and no special token out of text."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest
import tokenizers
from engines import TOKENIZER, tiny_tokenizer_json
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from fednl_runtime.errors import ModelFileError, RequestError
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXT)
def test_tokens_of_a_text_decode_to_its_exact_bytes(text: str) -> None:
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(text)) == text.encode()


@given(TEXT, TEXT)
def test_text_never_becomes_a_special_token(before: str, after: str) -> None:
    text = before + END_OF_TEXT + after
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.end_of_text not in tokens
    assert TOKENIZER.decode(tokens) == text


def test_every_byte_is_some_token() -> None:
    singles = {TOKENIZER.token_bytes(t) for t in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(t)) == 1}
    assert singles == {bytes([b]) for b in range(256)}


def test_the_special_token_and_unused_ids_have_no_bytes() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.end_of_text) == b""
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 5) == b""


def test_a_tokenizer_that_is_not_json_is_refused() -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        Tokenizer("{")


def test_a_tokenizer_without_the_special_token_is_refused() -> None:
    bare = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelFileError, match="lacks"):
        Tokenizer(bare.to_str())


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    words = tokenizers.Tokenizer(models.BPE(vocab={"日本": 0}, merges=[]))
    words.add_special_tokens([END_OF_TEXT])
    with pytest.raises(ModelFileError, match="not byte-level"):
        Tokenizer(words.to_str())


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({END_OF_TEXT: 0, "a": 1}, unk_token=END_OF_TEXT))
    words.add_special_tokens([END_OF_TEXT])
    with pytest.raises(ModelFileError, match="not byte-level BPE"):
        Tokenizer(words.to_str())


def test_a_tokenizer_keeps_no_words_of_what_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(models.BPE, "_resize_cache", lambda _, size: sizes.append(size))
    Tokenizer(tiny_tokenizer_json())
    assert sizes == [0]


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused() -> None:
    assert Tokenizer(tiny_tokenizer_json(), TOKENIZER.vocab_size).vocab_size == TOKENIZER.vocab_size
    with pytest.raises(ModelFileError, match="Export the model again"):
        Tokenizer(tiny_tokenizer_json(), TOKENIZER.vocab_size - 1)


def test_a_token_id_of_the_largest_size_costs_no_table_up_to_it() -> None:
    inner = json.loads(tiny_tokenizer_json())
    inner["model"]["vocab"]["zz"] = 2**32 - 1
    with pytest.raises(ModelFileError, match="4294967295"):
        Tokenizer(json.dumps(inner), 500)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate pair at 1"):
        TOKENIZER.encode("a\ud800")


def test_others_run_while_a_long_text_becomes_tokens() -> None:
    encoding = threading.Thread(target=TOKENIZER.encode, args=("the other day " * 100_000,))
    encoding.start()
    times = [time.perf_counter()]
    while encoding.is_alive():
        time.sleep(0.001)
        times.append(time.perf_counter())
    longest = max(after - before for before, after in itertools.pairwise(times))
    assert longest < (times[-1] - times[0]) / 2


def test_padding_and_truncation_settings_of_the_file_are_ignored() -> None:
    inner = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert Tokenizer(inner.to_str()).encode("hello there") == TOKENIZER.encode("hello there")
