"""Laws of the ablations' arms: each differs from Hope in what its name says and in nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from baselines import Transformer
from descent import Descent, descend
from models import TINY, random_tokens
from taught import Taught
from torch import Tensor
from variants import EagerCms, NormalisedSteps, OneTimeScale, silent, static, variants

from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict, gates, memory_read, unit
from fednl_runtime.state import state_shapes

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


def test_descent_takes_the_step_of_the_inner_gradient_and_nothing_more():
    """Token by token, against autograd of the inner loss at the boundary weights."""
    torch.manual_seed(1)
    c = dataclasses.replace(CONFIG, error_clip=100.0)
    model = Descent(c).double()
    layer = {n: t.detach() for n, t in model.layers[1].tensors().items()}
    u = tuple(unit(torch.randn(1, c.n_head, 3, c.d_head, dtype=torch.float64), c.norm_eps) for _ in range(4))
    names = ("w1", "w2", "w1_boundary", "w2_boundary")
    state = {n: 0.1 * torch.randn(1, *state_shapes(c)[f"1.{n}"], dtype=torch.float64) for n in names}
    adapt, stay = torch.ones(1, 2, dtype=torch.float64), torch.tensor([False])
    _, whole = descend(u, layer, state, adapt, stay, c)
    expected = {n: state[n].clone() for n in ("w1", "w2")}
    for t in range(3):
        one = tuple(x[:, :, t : t + 1] for x in u)
        k, v, eta, log_alpha = said(one, layer, state, c)
        w = [(layer[f"{n}_init"] + state[f"{n}_boundary"][0]).requires_grad_() for n in ("w1", "w2")]
        goal = memory_read(v, *w, c.norm_eps).detach()
        inner = 0.5 * (memory_read(k, *w, c.norm_eps) - goal).square().sum()
        for name, gradient in zip(("w1", "w2"), torch.autograd.grad(inner, w), strict=True):
            expected[name] = log_alpha.exp() * expected[name] - eta * gradient
    for name, value in expected.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-10)


def said(
    u: tuple[Tensor, ...], layer: TensorDict, state: TensorDict, c: HopeConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key, value `[5H, 1, h]`, step and log retention `[5H, 1, 1]` that the boundary memories give for one token."""
    w1, w2 = (layer[f"{n}_init"] + state[f"{n}_boundary"][0] for n in ("w1", "w2"))
    five = torch.cat([u[0], u[1], u[3], u[3], u[2]], 1)[0]
    k, v, eta_in, alpha_in, _ = memory_read(five, w1, w2, c.norm_eps).split(c.n_head)
    eta, log_alpha = gates(layer, eta_in[None], alpha_in[None], torch.ones(1, 2, dtype=torch.float64), c)
    k, v = (unit(x, c.norm_eps).repeat(len(MEMORIES), 1, 1) for x in (k, v))
    return k, v, *(x[0].repeat(len(MEMORIES), 1)[..., None] for x in (eta, log_alpha))


def test_taught_levels_learn_from_the_next_tokens_only():
    """With targets that the model is sure of the gradient vanishes, and so does what the levels learn."""
    torch.manual_seed(3)
    model = Taught(dataclasses.replace(CONFIG, cms_periods=(64,)))
    tokens = torch.from_numpy(random_tokens(CONFIG, 1, 129))
    _, state = model.loss(tokens[:, :-1], tokens[:, 1:], model.zeros())
    assert state["0.cms_f"].abs().sum() > 0
    assert state["0.cms_a"].abs().sum() > 0
    model.embedding.data *= 0
    model.embedding.data[:, 0] = 1e-3  # all tokens alike: the gradients along the other directions are zero
    _, state = model.loss(tokens[:, :-1], tokens[:, 1:], model.zeros())
    assert state["0.cms_f"][..., 1:].abs().max() < 1e-6


def test_an_eager_level_learns_faster_than_it_forgets():
    """Keys of rank r fill G / C with about 1 / r, so a chunk learns eps / r of the way and forgets 1 - lambda."""
    for kind, eager in ((EagerCms, True), (Hope, False)):
        block = kind(CONFIG).layers[0]
        learns, forgets = torch.sigmoid(block.cms_step) / 32, 1 - torch.sigmoid(block.cms_decay)
        assert ((learns > 10 * forgets) == eager).all()


def test_every_arm_builds_its_model():
    for name, variant in variants().items():
        with torch.device("meta"):
            size = sum(p.numel() for p in Transformer(variant.config).parameters())
        assert size > 5e5, name
