"""Laws of the sliding-window transformer: it sees its window and nothing else, however the stream is cut."""

from __future__ import annotations

import dataclasses
import itertools

import baselines
import pytest
import torch
from baselines import Transformer, TransformerWithTop, size
from models import TINY, random_tokens

from fednl_runtime.hope import Hope

CONFIG = dataclasses.replace(TINY, d_model=8, vocab_size=31, layers=("delta",))
WINDOW = 6


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(baselines, "WINDOW", WINDOW)


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).double()


def tokens(length: int, seed: int = 2) -> torch.Tensor:
    return torch.from_numpy(random_tokens(CONFIG, 2, length + 1, seed))


def nats(transformer: Transformer, row: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """Surprise `[B, T]`, read in pieces that end at `cuts`."""
    state, out = transformer.zeros(len(row)), []
    bounds = [0, *cuts, row.shape[1] - 1]
    for a, b in itertools.pairwise(bounds):
        loss, state = transformer.loss(row[:, a:b], row[:, a + 1 : b + 1], state)
        out.append(loss)
    return torch.cat(out, 1).detach()


@pytest.mark.parametrize("cuts", [(1,), (6, 7), (5, 11, 16)])
def test_any_split_of_a_stream_is_the_same(cuts):
    torch.testing.assert_close(nats(model(), tokens(19), cuts), nats(model(), tokens(19)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (5, 7), (4, 11, 16)])
def test_with_a_top_level_any_split_is_the_same_and_past_chunks_count(cuts):
    torch.manual_seed(0)
    transformer, row = TransformerWithTop(CONFIG).double(), tokens(18)
    whole, _ = transformer(row, transformer.zeros(2))
    state, out = transformer.zeros(2), []
    for a, b in itertools.pairwise([0, *cuts, row.shape[1]]):
        logits, state = transformer(row[:, a:b], state)
        out.append(logits)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=0, atol=1e-5)
    assert state["top.f"].abs().sum() > 0


def test_one_layer_sees_the_last_window_and_nothing_before():
    row, other = tokens(19), tokens(19)
    other[:, 4] = (other[:, 4] + 1) % CONFIG.vocab_size
    same = (nats(model(), row) - nats(model(), other)).abs().amax(0) < 1e-12
    assert same[:3].all()
    assert not same[3 : 4 + WINDOW].any()
    assert same[4 + WINDOW :].all()


def test_it_is_as_large_as_its_hope():
    config = dataclasses.replace(CONFIG, d_model=32, d_cms=40, layers=TINY.layers * 2)
    for kind in (Transformer, TransformerWithTop):
        assert size(kind(config)) == pytest.approx(size(Hope(config)), rel=0.02)


def test_it_trains():
    transformer, row = model().float(), tokens(20)
    optimizer = torch.optim.Adam(transformer.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = transformer.loss(row[:, :-1], row[:, 1:], transformer.zeros(2))[0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
