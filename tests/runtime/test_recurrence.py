"""Laws of the chunk forms: autograd's inner gradient, others' delta rule, stable decays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import TINY
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from fednl_runtime import recurrence as rec
from fednl_runtime import reference

LENGTHS = [1, 63, 100]


def random(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal numbers in float64."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def test_the_inner_gradient_is_that_of_autograd():
    config = dataclasses.replace(TINY, error_clip=1e9)
    k, v = (rec.unit(random(seed, 7, 5), config.norm_eps) for seed in (0, 1))
    w1, w2 = random(2, 3, 5).requires_grad_(), random(3, 5, 3).requires_grad_()
    v_hat = rec.memory_read(v, w1, w2, config.norm_eps).detach()
    (0.5 * (rec.memory_read(k, w1, w2, config.norm_eps) - v_hat).square().sum()).backward()
    a_hat, e, d = rec.inner_gradient(k, v_hat, w1, w2, config)
    torch.testing.assert_close(a_hat.T @ e, w1.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(k.T @ d, w2.grad, rtol=1e-10, atol=1e-12)


def test_the_clipped_inner_gradient_is_the_law_s():
    k, v_hat, w1, w2 = random(0, 7, 5), 5 * random(1, 7, 5), 3 * random(2, 3, 5), random(3, 5, 3)
    ours = rec.inner_gradient(k, v_hat, w1, w2, TINY)
    law = reference.inner_gradient(*(x.numpy() for x in (k, v_hat)), *(x.numpy()[None] for x in (w1, w2)), TINY)
    for one, other in zip(ours, law, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-12)


def delta_inputs(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v, eta, log alpha and a state that is not zero: 2 rows, 3 heads of 8; unit keys and queries."""
    q, k = (F.normalize(random(seed, 2, 3, length, 8), dim=-1) for seed in (0, 1))
    v, eta, log_alpha = random(2, 2, 3, length, 8), random(3, 2, 3, length).sigmoid(), random(4, 2, 3, length)
    inputs = (q, k, v, eta, F.logsigmoid(3 + log_alpha), 0.5 * random(5, 2, 3, 8, 8))
    return tuple(x.to(dtype) for x in inputs)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("theirs", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_delta_is_the_gated_delta_rule_of_transformers(theirs, length):
    q, k, v, eta, log_alpha, s = delta_inputs(length, torch.float32)
    ours, last = rec.delta(q, k, v, eta, log_alpha, s, chunk=64)
    # They scale queries by 1 / sqrt(head width), which we do not.
    q, k, v, log_alpha, eta = (x.transpose(1, 2) for x in (q * 8**0.5, k, v, log_alpha, eta))
    out, their_last = theirs(q, k, v, g=log_alpha, beta=eta, initial_state=s, output_final_state=True)
    torch.testing.assert_close(ours, out.transpose(1, 2), rtol=0, atol=2e-6)
    torch.testing.assert_close(last, their_last, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_delta_is_the_literal_loop_whatever_the_chunk(length, chunk):
    q, k, v, eta, log_alpha, s = delta_inputs(length, torch.float64)
    ours, last = rec.delta(q, k, v, eta, log_alpha, s, chunk)
    for t in range(length):
        s = log_alpha[:, :, t, None, None].exp() * s
        error = v[:, :, t] - (k[:, :, t, None] @ s)[:, :, 0]
        s = s + eta[:, :, t, None, None] * k[:, :, t, :, None] * error[:, :, None]
        torch.testing.assert_close(ours[:, :, t], (q[:, :, t, None] @ s)[:, :, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(last, s, rtol=0, atol=1e-12)


def test_decays_far_apart_neither_overflow_nor_lose_their_gradient():
    total = (-4.0 * torch.arange(1.0, 101)).requires_grad_()
    decay = rec.decay_matrix(total, total, 0)
    decay.sum().backward()
    assert torch.isfinite(decay).all()
    assert torch.isfinite(total.grad).all()
    assert torch.equal(decay, decay.tril())


def test_cross_entropy_and_its_gradients_are_those_of_autograd():
    h, embedding = random(0, 2, 9, 6).requires_grad_(), random(1, 11, 6).requires_grad_()
    targets, weights = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0)), random(2, 2, 9)
    loss, error = rec.softmax_error((h @ embedding.T).detach(), targets)
    g = error @ embedding.detach()
    loss = rec.CrossEntropy.apply(h, embedding, loss, g, error)
    expected = F.cross_entropy((h @ embedding.T).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(g, torch.autograd.grad(expected.sum(), h, retain_graph=True)[0], rtol=0, atol=1e-12)
    ours = torch.autograd.grad((weights * loss).sum(), (h, embedding))
    theirs = torch.autograd.grad((weights * expected).sum(), (h, embedding))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
