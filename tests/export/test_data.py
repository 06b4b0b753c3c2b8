"""Laws of training text: sources, tokenizer, and lanes that never lose their place."""

from __future__ import annotations

import lzma

import numpy as np
import pytest

from fednl_runtime.corpus import encode_documents
from fednl_runtime.errors import CheckpointError, FednlError
from fednl_runtime.export.data import (
    Lanes,
    Source,
    domain_weights,
    find_sources,
    load_source,
    sample,
    tokenizer_of,
    train_tokenizer,
)
from fednl_runtime.tokenizer import END_OF_TEXT, Tokenizer

END = 9
TEXT = "the cat sat on the mat with the hat\n" * 40


@pytest.fixture(name="corpus")
def corpus_fixture(tmp_path):
    for domain, name in (("b", "two.txt.xz"), ("b", "one.txt"), ("a", "three.txt"), ("a", "notes.md")):
        path = tmp_path / "corpus" / domain / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(TEXT.encode()) if name.endswith(".xz") else TEXT.encode())
    return tmp_path / "corpus"


def source(length: int, domain: str = "d", every: int = 7, start: int = 0) -> Source:
    """Tokens that count up from `start`, but for an end of text after each `every`."""
    tokens = (np.arange(length) + start + 10).astype(np.uint16)
    tokens[every - 1 :: every] = END
    return Source(domain, f"{domain}{start}", tokens, tokens[:0])


def lanes_over(sources: list[Source], batch: int = 3, run: tuple[int, int] = (20, 200), seed: int = 0) -> Lanes:
    return Lanes(sources, batch, np.random.default_rng(seed), run, END)


def test_sources_are_the_texts_of_each_domain_in_order(corpus):
    names = [f"{p.parent.name}/{p.name}" for p in find_sources(corpus)]
    assert names == ["a/three.txt", "b/one.txt", "b/two.txt.xz"]
    assert [p.name for p in find_sources(corpus, ("b",))] == ["three.txt"]


def test_a_domain_that_is_not_there_cannot_be_left_out(corpus):
    with pytest.raises(FednlError, match="no domain c, d to leave out"):
        find_sources(corpus, ("d", "a", "c"))


@pytest.mark.parametrize("without", [(), ("a", "b")])
def test_a_folder_without_texts_is_refused(without, corpus, tmp_path):
    with pytest.raises(FednlError, match="to train on"):
        find_sources(corpus if without else tmp_path, without)


def test_a_sample_is_spread_over_the_text_and_no_larger_than_asked():
    text = "".join(chr(i) for i in range(0x4E00, 0x4E00 + 1000))
    parts = list(sample(text, 100))
    assert sum(map(len, parts)) == 100
    assert (parts[0][0], parts[-1][-1]) == (text[0], text[-1])
    assert list(sample(text, 1000)) == [text]


def test_a_trained_tokenizer_gives_every_text_back(corpus):
    tokenizer = Tokenizer(train_tokenizer(find_sources(corpus), 300))
    assert 257 < tokenizer.vocab_size <= 300
    for text in (TEXT, "Zoë €5 \t\x00\n日本", f"a {END_OF_TEXT} b", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text not in tokenizer.encode(END_OF_TEXT)


def test_a_run_keeps_its_tokenizer(corpus, tmp_path):
    first = tokenizer_of(tmp_path / "run", find_sources(corpus), 300)
    assert tokenizer_of(tmp_path / "run", find_sources(corpus, ("a",)), 320) == first


@pytest.mark.parametrize("damage", [None, b"{}", b"\xff"])
def test_a_tokenizer_that_does_not_fit_the_run_is_refused(damage, corpus, tmp_path):
    size = Tokenizer(tokenizer_of(tmp_path, find_sources(corpus), 300)).vocab_size
    if damage:
        (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(CheckpointError, match="Choose another folder"):
        tokenizer_of(tmp_path, find_sources(corpus), 300 if damage else size - 1)


def test_a_source_holds_out_its_end_and_is_tokenised_once(corpus, tmp_path, monkeypatch):
    json = train_tokenizer(find_sources(corpus), 300)
    loaded = load_source(corpus / "b/two.txt.xz", json, tmp_path / "cache", held_out=10)
    assert (loaded.domain, loaded.name, len(loaded.validation)) == ("b", "two", 10)
    whole = np.concatenate([loaded.train, loaded.validation])
    np.testing.assert_array_equal(whole, encode_documents(Tokenizer(json), TEXT))
    monkeypatch.delattr("fednl_runtime.export.data.encode_documents")
    again = load_source(corpus / "b/two.txt.xz", json, tmp_path / "cache", held_out=10**6)
    assert len(again.validation) == len(whole) // 10


@pytest.mark.parametrize("text", ["", "a", "the cat"])
def test_a_source_too_short_to_hold_out_anything_is_all_for_training(text, corpus, tmp_path):
    (corpus / "a/three.txt").write_text(text)
    json = train_tokenizer(find_sources(corpus), 300)
    loaded = load_source(corpus / "a/three.txt", json, tmp_path / "cache", held_out=10)
    assert len(loaded.validation) == 0
    np.testing.assert_array_equal(loaded.train, encode_documents(Tokenizer(json), text))


def test_a_domain_counts_by_the_square_root_of_its_tokens():
    weights = domain_weights([source(300, "a"), source(100, "a"), source(100, "b"), source(0, "c")])
    np.testing.assert_allclose(weights, [0.5, 1 / 6, 1 / 3, 0], rtol=1e-12)


def test_lanes_choose_sources_by_their_weights():
    lanes = lanes_over([source(900, "a"), source(100, "b")], batch=2000)
    lanes.next(10)
    assert abs(np.mean(lanes.source == 0) - 0.75) < 0.03


@pytest.mark.parametrize("window", [1, 7, 63])
def test_a_row_goes_on_where_it_ended_unless_its_lane_begins_anew(window):
    sources = [source(100), source(100, start=1000), source(64, start=2000)]
    lanes = lanes_over(sources)
    rows, fresh = lanes.next(window)
    assert fresh.all()
    begun = 0
    for _ in range(100):
        before, left = rows, lanes.left.copy()
        ended = [int(lanes.offset[i]) + window + 1 > len(sources[lanes.source[i]].train) for i in range(3)]
        rows, fresh = lanes.next(window)
        np.testing.assert_array_equal(fresh, (left == 0) | ended)
        np.testing.assert_array_equal(rows[~fresh, 0], before[~fresh, -1])
        begun += fresh.sum()
    assert begun > 3


@pytest.mark.parametrize("window", [1, 7, 63])
def test_a_row_lies_within_one_source_and_a_fresh_one_at_the_start_of_a_document(window):
    sources = [source(100), source(100, start=1000), source(64, start=2000)]
    lanes = lanes_over(sources)
    for _ in range(100):
        rows, fresh = lanes.next(window)
        for lane, row in enumerate(rows):
            tokens, start = sources[lanes.source[lane]].train, int(lanes.offset[lane]) - window
            np.testing.assert_array_equal(row, tokens[start : start + window + 1])
            assert not fresh[lane] or start == 0 or tokens[start - 1] == END


def test_a_lane_reads_between_the_bounds_of_a_run():
    lanes, lengths, current = lanes_over([source(60000)], batch=1, run=(20, 200)), [], 0
    for _ in range(2000):
        _, fresh = lanes.next(4)
        if fresh[0] and current:
            lengths.append(current)
            current = 0
        current += 4
    assert 16 <= min(lengths) < 30
    assert 150 < max(lengths) <= 200


def test_lanes_go_on_from_their_state():
    sources = [source(100), source(90, "e", start=1000)]
    lanes = lanes_over(sources)
    for _ in range(5):
        lanes.next(7)
    other = lanes_over(sources, seed=1)
    other.restore(lanes.state())
    other.rng.bit_generator.state = lanes.rng.bit_generator.state
    for _ in range(50):
        for one, two in zip(lanes.next(7), other.next(7), strict=True):
            np.testing.assert_array_equal(one, two)


def test_sources_that_are_all_shorter_than_a_window_are_refused():
    with pytest.raises(FednlError, match="more than 100 tokens"):
        lanes_over([source(100), source(7)]).next(100)
