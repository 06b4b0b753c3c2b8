"""Laws of the torch scores: they are the arms of `eval`, computed by the model that was trained."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scoring
import torch
from engines import CONFIG, NumpyBackend
from models import random_tokens

from fednl_runtime import evaluate as ev
from fednl_runtime.hope import Hope, parameters

CALM = dataclasses.replace(CONFIG, eta_max=0.2, top_period=4, memory_period=8, cms_periods=(8, 16))


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    for name, value in {"RESET_WINDOW": 32, "RESET_CONTEXT": 8, "FREEZE_AFTER": 24}.items():
        monkeypatch.setattr(ev, name, value)
    monkeypatch.setattr(scoring, "FREEZE_AFTER", 24)
    monkeypatch.setattr(scoring, "PIECE", 16)


def test_the_arms_are_those_of_eval():
    backend = NumpyBackend(CALM, segment=4)
    torch.manual_seed(0)
    model = Hope(CALM)
    backend.params = parameters(model)
    tokens = random_tokens(CALM, 2, 97)
    for i, row in enumerate(tokens):
        expected = dict(zip(("on", "frozen"), ev.carried(backend, row, lambda _: None), strict=True))
        expected["reset"] = ev.cut_short(backend, row, 4, lambda _: None)
        for name, arm in scoring.ARMS.items():
            np.testing.assert_allclose(arm(model, torch.from_numpy(tokens))[i], expected[name], rtol=0, atol=2e-4)
    assert np.abs(expected["on"] - expected["frozen"]).max() > 1e-3
