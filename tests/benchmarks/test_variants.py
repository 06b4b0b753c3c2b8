"""Laws of the ablations' arms: each differs from Hope in what its name says and in nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from baselines import Transformer
from models import TINY, random_tokens
from variants import NormalisedSteps, OneTimeScale, silent, static, variants

from fednl_runtime.config import MEMORIES
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict

CONFIG = dataclasses.replace(TINY, top_period=4)


def state_after(kind: type[Hope], length: int = 16) -> TensorDict:
    """The state of a random model of a class after a few chunks."""
    torch.manual_seed(3)
    model = kind(CONFIG)
    return model(torch.from_numpy(random_tokens(CONFIG, 2, length)), model.zeros(2))[1]


def test_a_silent_level_stays_empty_and_the_others_learn():
    state = state_after(silent(1))["0.cms_f"]
    assert not state[:, 1].any()
    assert state[:, 0].any()
    torch.testing.assert_close(state_after(silent())["0.cms_f"], state_after(Hope)["0.cms_f"])


@pytest.mark.parametrize("memory", MEMORIES[:-1])
def test_a_static_memory_keeps_its_initial_weights_and_the_others_learn(memory):
    state = state_after(static(memory))
    for name in ("w1", "w2", "w1_boundary", "w2_boundary"):
        by_memory = state[f"1.{name}"].unflatten(1, (len(MEMORIES), -1)).flatten(2).abs().amax((0, 2))
        assert {m for m, size in zip(MEMORIES, by_memory, strict=True) if size == 0} == {memory}


def test_one_time_scale_is_the_mean_of_the_half_lives():
    bias = OneTimeScale(CONFIG).layers[0].b_alpha
    half_lives = torch.log(torch.tensor(2.0)) / -torch.nn.functional.logsigmoid(bias)
    torch.testing.assert_close(half_lives, torch.full_like(half_lives, (64 * 8192) ** 0.5), rtol=1e-3, atol=0)


def test_a_normalised_step_moves_the_memory_further_than_one_divided_by_the_period():
    name = "0.cms_f"
    assert state_after(NormalisedSteps)[name][:, 1].norm() > state_after(Hope)[name][:, 1].norm() > 0


def test_every_arm_builds_its_model():
    for name, variant in variants().items():
        with torch.device("meta"):
            size = sum(p.numel() for p in Transformer(variant.config).parameters())
        assert size > 5e5, name
