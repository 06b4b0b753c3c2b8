"""Laws of the NumPy reference, at float64, against torch autograd and against literal loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import TINY, random_params, random_state, random_tokens

from fednl_runtime.reference import (
    cms_close,
    inner_gradient,
    layer_items,
    mixer,
    run,
    sigmoid,
    silu,
    step,
    top_close,
    unit,
)
from fednl_runtime.state import MemoryState

FAST_WEIGHTS = ("s", "w1", "w2", "w1_boundary", "w2_boundary", "cms_f", "cms_a", "cms_g", "top.f")
SLOW_WEIGHTS = ("cms_f", "cms_a", "cms_g", "top.f")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def is_one_of(name: str, weights: tuple[str, ...]) -> bool:
    """Whether a state tensor's name, with or without its layer, is in `weights`."""
    return name in weights or name.partition(".")[2] in weights


def torch_unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def torch_memory(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float) -> torch.Tensor:
    return x + torch_unit(F.silu(x @ w2), eps) @ w1


def test_the_inner_gradients_are_those_of_autograd():
    config = dataclasses.replace(TINY, error_clip=1e9)
    rng = np.random.default_rng(0)
    k, value = unit(rng.normal(size=(2, 5)), config.norm_eps), unit(rng.normal(size=(2, 5)), config.norm_eps)
    w1, w2 = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 5, 3))
    for i in range(2):
        t1, t2 = torch.tensor(w1[i], requires_grad=True), torch.tensor(w2[i], requires_grad=True)
        v_hat = torch_memory(torch.tensor(value[i]), t1, t2, config.norm_eps).detach()
        loss = 0.5 * (torch_memory(torch.tensor(k[i]), t1, t2, config.norm_eps) - v_hat).square().sum()
        loss.backward()
        a_hat, e, d = inner_gradient(k[i], v_hat.numpy(), w1[i], w2[i], config)
        np.testing.assert_allclose(np.outer(a_hat, e), t1.grad, **CLOSE)
        np.testing.assert_allclose(np.outer(k[i], d), t2.grad, **CLOSE)


def test_the_errors_of_a_memory_are_clipped():
    rng = np.random.default_rng(0)
    k, v_hat = rng.normal(size=(7, 3)), 50 * rng.normal(size=(7, 3))
    _, e, d = inner_gradient(k, v_hat, 9 * rng.normal(size=(7, 5, 3)), rng.normal(size=(7, 3, 5)), TINY)
    assert np.linalg.norm(e, axis=-1).max() <= TINY.error_clip
    assert np.linalg.norm(d, axis=-1).max() <= TINY.error_clip


def test_a_delta_layer_is_the_literal_recurrence():
    c, length = TINY, 9
    layer = layer_items(random_params(), "layers.0.")
    state = layer_items(random_state().tensors, "0.")
    rng = np.random.default_rng(3)
    xs = rng.normal(size=(length, c.d_model))
    s, tail = state["s"][0].copy(), list(state["conv"][0])
    for x in xs:
        y, state = mixer(x[None], layer, state, np.ones((1, 2)), np.zeros(1, bool), c)

        projected = layer["w_in"] @ (x / np.sqrt(np.mean(x**2) + c.norm_eps) * layer["norm"])
        u, gate = projected[: 4 * c.d_model], projected[4 * c.d_model :]
        tail.append(u)
        mixed = sum(layer["conv"][:, j] * tail[-c.d_conv + j] for j in range(c.d_conv))
        k, v, q, g = mixed.reshape(4, c.n_head, c.d_head)
        y_heads = []
        for i in range(c.n_head):
            k_i, v_i, q_i, g_i = (t[i] / np.sqrt(t[i] @ t[i] + c.norm_eps) for t in (k, v, q, g))
            eta = c.eta_max * sigmoid(np.sqrt(c.d_head) * g_i @ layer["r_eta"][i] + layer["b_eta"][i])
            alpha = sigmoid(np.sqrt(c.d_head) * g_i @ layer["r_alpha"][i] + layer["b_alpha"][i])
            alpha = max(alpha, np.exp(c.log_alpha_min))
            s[i] = alpha * s[i] + eta * np.outer(k_i, v_i - alpha * s[i].T @ k_i)
            read = s[i].T @ q_i
            y_heads.append(read / np.sqrt(np.mean(read**2) + c.norm_eps) * layer["head_norm"])
        expected = layer["w_out"] @ (np.concatenate(y_heads) * silu(gate))
        np.testing.assert_allclose(y[0], expected, **CLOSE)
    np.testing.assert_allclose(state["s"][0], s, **CLOSE)


def test_the_convolution_of_a_fresh_session_sees_zeros_before_the_first_token():
    params, tokens = random_params(), random_tokens(TINY, 1, 1)
    _, state = run(params, TINY, tokens, MemoryState.zeros(TINY, 1, np.float64))
    np.testing.assert_array_equal(state.tensors["0.conv"][:, :-1], 0)
    assert np.all(state.tensors["0.conv"][:, -1] != 0)


def test_rows_at_different_positions_do_not_see_each_other():
    params, tokens, start = random_params(), random_tokens(TINY, 3, 17), random_state(batch=3, position=1)
    logits, state = run(params, TINY, tokens, start)
    for i in range(3):
        alone, alone_state = run(params, TINY, tokens[i : i + 1], start.row(i))
        np.testing.assert_allclose(logits[i], alone[0], **CLOSE)
        for name, tensor in alone_state.tensors.items():
            np.testing.assert_allclose(state.tensors[name][i], tensor[0], **CLOSE, err_msg=name)


def test_adapt_is_a_scale_for_each_row():
    params, tokens, start = random_params(), random_tokens(TINY, 3, 17), random_state(batch=3, position=1)
    adapt = np.array([[1.0, 1.0], [0.0, 0.0], [0.5, 0.25]])
    logits, _ = run(params, TINY, tokens, start, adapt)
    for i in range(3):
        alone, _ = run(params, TINY, tokens[i : i + 1], start.row(i), adapt[i : i + 1])
        np.testing.assert_allclose(logits[i], alone[0], **CLOSE)


def test_a_stream_cut_into_calls_is_bit_for_bit_the_stream():
    params, tokens, start = random_params(), random_tokens(TINY, 2, 19), random_state(batch=2)
    logits, state = run(params, TINY, tokens, start)
    first, middle = run(params, TINY, tokens[:, :7], start)
    second, end = run(params, TINY, tokens[:, 7:], middle)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), logits)
    for name, tensor in state.tensors.items():
        np.testing.assert_array_equal(end.tensors[name], tensor)


def test_zeros_are_a_fresh_session_of_any_model():
    for seed in range(3):
        logits, state = run(
            random_params(seed=seed), TINY, random_tokens(TINY, 1, 13), MemoryState.zeros(TINY, 1, np.float64)
        )
        assert np.isfinite(logits).all()
        np.testing.assert_array_equal(state.position, [13])


def test_running_leaves_the_given_state_alone():
    start = random_state(batch=2)
    kept = start.copy()
    run(random_params(), TINY, random_tokens(TINY, 2, 13), start)
    for name, tensor in start.tensors.items():
        np.testing.assert_array_equal(tensor, kept.tensors[name], err_msg=name)


def test_adapt_0_0_leaves_every_fast_weight_bit_identical():
    start = random_state(batch=2, position=1)
    _, end = run(random_params(), TINY, random_tokens(TINY, 2, 25), start, np.zeros((1, 2)))
    for name, tensor in start.tensors.items():
        same = np.array_equal(end.tensors[name], tensor)
        assert same == is_one_of(name, FAST_WEIGHTS), name
    np.testing.assert_array_equal(end.position, start.position + 25)


def test_adapt_1_0_freezes_only_the_slow_levels():
    start = random_state(batch=2, position=1)
    _, end = run(random_params(), TINY, random_tokens(TINY, 2, 25), start, np.array([[1.0, 0.0]]))
    for name, tensor in start.tensors.items():
        same = np.array_equal(end.tensors[name], tensor)
        assert same == is_one_of(name, SLOW_WEIGHTS), name


def test_adapt_0_1_freezes_only_the_token_memories():
    start = random_state(batch=2, position=1)
    _, end = run(random_params(), TINY, random_tokens(TINY, 2, 25), start, np.array([[0.0, 1.0]]))
    for name, tensor in start.tensors.items():
        frozen = is_one_of(name, FAST_WEIGHTS) and not is_one_of(name, SLOW_WEIGHTS)
        assert np.array_equal(end.tensors[name], tensor) == frozen, name


@pytest.mark.parametrize("period", [4, 7])
def test_boundary_weights_are_promoted_at_multiples_of_the_period(period):
    c = dataclasses.replace(TINY, memory_period=period)
    params, state = random_params(c), random_state(c, position=1)
    for token in random_tokens(c, 1, 3 * period)[0]:
        before = state
        _, state = step(params, c, np.array([token]), state)
        source = "1.w1" if before.position[0] % period == 0 else "1.w1_boundary"
        np.testing.assert_array_equal(state.tensors["1.w1_boundary"], before.tensors[source])


def test_a_cms_level_closes_with_the_gradient_of_its_local_loss_over_the_chunk():
    layer = layer_items(random_params(), "layers.0.")
    rng = np.random.default_rng(5)
    r, d = TINY.cms_rank, TINY.d_model
    f = rng.normal(size=(1, TINY.n_cms, r, d))
    p, target = rng.normal(size=(TINY.n_cms, 6, r)), rng.normal(size=(TINY.n_cms, 6, d))
    state = {"cms_f": f, "cms_a": (p.swapaxes(1, 2) @ target)[None], "cms_g": (p.swapaxes(1, 2) @ p)[None]}
    closed, a, g = cms_close(layer, state, np.ones((1, 2)), np.array([[True, False]]), TINY)

    weight = torch.tensor(f[0, 0], requires_grad=True)
    (0.5 * (torch.tensor(p[0]) @ weight - torch.tensor(target[0])).square().sum()).backward()
    rate, decay = sigmoid(layer["cms_step"][0]) / TINY.cms_periods[0], sigmoid(layer["cms_decay"][0])
    np.testing.assert_allclose(closed[0, 0], decay * f[0, 0] - rate * weight.grad.numpy(), **CLOSE)
    np.testing.assert_array_equal(closed[0, 1], f[0, 1])
    assert not a[0, 0].any()
    assert not g[0, 0].any()
    np.testing.assert_array_equal(a[0, 1], state["cms_a"][0, 1])


def test_the_top_level_descends_the_exact_next_token_loss_of_its_chunk():
    """Runs a chunk with mixed adapt scales, then rebuilds its loss in torch from the outputs alone."""
    c = TINY
    params, start = random_params(), random_state(position=c.top_period)
    tokens = random_tokens(c, 1, c.top_period + 1)[0]
    scales = [1.0, 0.0, 0.5, 1.0, 1.0]
    state, hidden, reads = start, [], []
    for token, scale in zip(tokens[:-1], scales, strict=True):
        _, state = step(params, c, np.array([token]), state, np.array([[1.0, scale]]))
        hidden.append(state.tensors["top.h"][0, -1])
        reads.append(state.tensors["top.p"][0, -1])
    frozen = state.tensors["top.f"][0]
    _, after = step(params, c, tokens[-1:], state, np.array([[1.0, 1.0]]))

    weight = torch.tensor(frozen, requires_grad=True)
    h, p = torch.tensor(np.array(hidden)), torch.tensor(np.array(reads))
    # The pending p carries adapt's scale, so d loss / d F through it is weighted token by token.
    moved = h - p @ torch.tensor(frozen) + p @ weight
    logits = moved @ torch.tensor(params["embedding"]).T
    F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").backward()
    power = np.sum(params["embedding"] ** 2) / c.vocab_size
    rate, decay = 2 * sigmoid(params["top.step"]) / power, sigmoid(params["top.decay"])
    np.testing.assert_allclose(after.tensors["top.f"][0], decay * frozen - rate * weight.grad.numpy(), **CLOSE)


def test_the_top_level_reads_its_own_weight_in_the_logits():
    params, state = random_params(), random_state(position=1)
    logits, after = step(params, TINY, np.array([4]), state)
    np.testing.assert_allclose(logits[0], params["embedding"] @ after.tensors["top.h"][0, -1], **CLOSE)
    plain = {**state.tensors, "top.f": np.zeros_like(state.tensors["top.f"])}
    _, without = step(params, TINY, np.array([4]), MemoryState(plain, state.position))
    moved = after.tensors["top.h"][0, -1] - without.tensors["top.h"][0, -1]
    np.testing.assert_allclose(moved, after.tensors["top.p"][0, -1] @ state.tensors["top.f"][0], **CLOSE)


def test_the_top_weight_never_exceeds_its_cap():
    c = dataclasses.replace(TINY, norm_cap=0.5)
    params, state = random_params(), random_state()
    state.tensors["top.f"] *= 1e3
    f = top_close(params, state.tensors, np.array([3]), np.ones((1, 2)), np.array([True]), c)
    cap = c.norm_cap / np.sqrt(np.sum(params["embedding"] ** 2) / c.vocab_size)
    np.testing.assert_allclose(np.linalg.norm(f), cap, rtol=1e-9)


@pytest.mark.parametrize("profile", ["delta", "self_modifying"])
def test_3000_random_tokens_stay_finite_and_bounded(profile):
    c = dataclasses.replace(TINY, layers=(profile,), memory_period=8, cms_periods=(8, 64))
    params, state = random_params(c), MemoryState.zeros(c, 1, np.float64)
    norms = []
    for chunk in range(6):
        logits, state = run(params, c, random_tokens(c, 1, 500, seed=chunk), state)
        assert np.isfinite(logits).all()
        norms.append(max(np.abs(t).max() for n, t in state.tensors.items() if is_one_of(n, FAST_WEIGHTS)))
    assert max(norms) < 100
    assert norms[-1] < 3 * norms[0]


def test_float32_parameters_and_state_stay_float32():
    params = {name: np.asarray(value, np.float32) for name, value in random_params().items()}
    logits, state = run(params, TINY, random_tokens(TINY, 2, 13), MemoryState.zeros(TINY, 2))
    assert logits.dtype == np.float32
    assert {t.dtype for t in state.tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("change", [{"cms_periods": ()}, {"top_rank": 0}, {"layers": ("delta",)}], ids=str)
def test_a_model_may_leave_levels_out(change):
    c = dataclasses.replace(TINY, **change)
    logits, state = run(random_params(c), c, random_tokens(c, 2, 13), MemoryState.zeros(c, 2, np.float64))
    assert logits.shape == (2, 13, c.vocab_size)
    assert set(state.tensors) == set(MemoryState.zeros(c).tensors)
