"""Laws of the recall task: what is asked was said, and only what is asked is scored."""

from __future__ import annotations

import dataclasses

import associative as task
import numpy as np
import torch
from associative import KIND, PAIRS, accuracy, query_loss, sequences

from fednl_runtime.hope import Hope

CONFIG = dataclasses.replace(task.CONFIG, d_model=8, d_cms=8, cms_rank=4, d_memory=4)


def test_every_question_repeats_a_pair_of_its_own_row():
    rows = sequences(3, 7, np.random.default_rng(0)).numpy()
    assert rows.shape == (3, 4 * PAIRS + 7)
    for row in rows:
        said, asked = (set(map(tuple, part.reshape(-1, 2))) for part in (row[: 2 * PAIRS], row[-2 * PAIRS :]))
        assert said == asked
        assert len({key for key, _ in said}) == len({value for _, value in said}) == PAIRS
        assert (row[2 * PAIRS : -2 * PAIRS] < KIND).all()


def test_the_loss_is_that_of_the_values_asked_for(monkeypatch):
    torch.manual_seed(0)
    model = Hope(CONFIG)
    rows = sequences(2, 5, np.random.default_rng(0))
    nats, _ = model.loss(rows[:, :-1], rows[:, 1:], model.zeros(2))
    values = [t for t in range(rows.shape[1] - 2 * PAIRS, rows.shape[1]) if rows[0, t] >= 2 * KIND]
    torch.testing.assert_close(query_loss(model, rows), nats[:, [t - 1 for t in values]].mean())


def test_a_model_that_learns_nothing_recalls_at_chance(monkeypatch):
    monkeypatch.setattr(task, "DISTANCES", (5, 20))
    torch.manual_seed(0)
    recalled = accuracy(Hope(CONFIG), 16, False, np.random.default_rng(0))
    assert set(recalled) == {5, 20}
    assert all(share < 0.2 for share in recalled.values())
