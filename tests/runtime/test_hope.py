"""Laws of Hope in torch: the NumPy law for any split, and a loss that is autograd's."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import TINY, random_params, random_state, random_tokens

from fednl_runtime import hope_step, reference
from fednl_runtime.config import HopeConfig
from fednl_runtime.hope import HALF_LIVES, Hope, cut, parameters, retention_bias, to_arrays, to_tensors
from fednl_runtime.state import MemoryState, state_bytes

LENGTHS = [1, 63, 100]
SETTINGS = [(1, 1), (1, 0), (0, 1), (0, 0), (0.5, 0.5)]
SPLITS = [(), (1, 2, 50), (7, 40, 41, 99)]
CHANGES = {
    "both": {},
    "delta": {"layers": ("delta",)},
    "self_modifying": {"layers": ("self_modifying", "self_modifying")},
    "no_cms": {"cms_periods": ()},
    "no_top": {"top_rank": 0},
    "neither": {"cms_periods": (), "top_rank": 0},
}
CALM = dataclasses.replace(TINY, eta_max=0.2)
"""Random memories with full steps are chaotic: they multiply any rounding a million times in 100 tokens."""

CONFIGS = {name: dataclasses.replace(CALM, **change) for name, change in CHANGES.items()}
FAST_WEIGHTS = ("s", "w1", "w2", "w1_boundary", "w2_boundary", "cms_f", "f")
EXACT = {"rtol": 0, "atol": 1e-10}
SINGLE = {"rtol": 0, "atol": 1e-4}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def torch_model(config: HopeConfig, dtype: torch.dtype = torch.float64, chunk: int = 64) -> Hope:
    """The model with the parameters of `random_params`, which give all heads one norm."""
    model, params = Hope(config, chunk=chunk).to(dtype), random_params(config)
    own = model.state_dict()
    model.load_state_dict({name: torch.tensor(params[name]).expand(own[name].shape) for name in own})
    return model


@functools.cache
def law(config: HopeConfig, length: int, adapt: tuple[float, ...] = (1, 1)) -> tuple[np.ndarray, MemoryState]:
    """Logits and last state of the NumPy law from `start_of`, with `adapt` for all rows or for each in turn."""
    tokens, state = random_tokens(config, 3, length), random_state(config, batch=3, position=1)
    return reference.run(random_params(config), config, tokens, state, np.reshape(adapt, (-1, 2)).astype(float))


def start_of(config: HopeConfig, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A random state of three rows, each at its own position."""
    state = to_tensors(random_state(config, batch=3, position=1))
    return {n: t if n == "position" else t.to(dtype) for n, t in state.items()}


def call_by_call(model, tokens, state, splits, adapt):
    """Logits and state of `forward` over the pieces that `splits` cuts the tokens into."""
    ends = [0, *(s for s in splits if s < tokens.shape[1]), tokens.shape[1]]
    logits = []
    with torch.no_grad():
        for a, b in itertools.pairwise(ends):
            out, state = model(torch.from_numpy(tokens[:, a:b]), state, adapt)
            logits.append(out)
    return torch.cat(logits, 1).numpy(), to_arrays(state)


def assert_same(logits, state: MemoryState, expected, expected_state: MemoryState, **bounds):
    np.testing.assert_allclose(logits, expected, **bounds)
    np.testing.assert_array_equal(state.position, expected_state.position)
    assert state.tensors.keys() == expected_state.tensors.keys()
    for name, tensor in expected_state.tensors.items():
        np.testing.assert_allclose(state.tensors[name], tensor, err_msg=name, **bounds)


@configs
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_is_the_law_for_any_split_into_calls(config, length):
    tokens = random_tokens(config, 3, length)
    for splits in SPLITS:
        result = call_by_call(torch_model(config), tokens, start_of(config), splits, None)
        assert_same(*result, *law(config, length), **EXACT)


@pytest.mark.parametrize("adapt", SETTINGS, ids=str)
def test_forward_is_the_law_at_any_adapt(adapt):
    rows = torch.tensor([adapt], dtype=torch.float64).expand(3, 2)
    result = call_by_call(torch_model(CALM), random_tokens(CALM, 3, 63), start_of(CALM), (10, 31), rows)
    assert_same(*result, *law(CALM, 63, adapt), **EXACT)


def test_forward_is_the_law_with_an_adapt_for_each_row():
    scales = (1, 0, 0, 1, 0.5, 0.25)
    rows = torch.tensor(scales, dtype=torch.float64).view(3, 2)
    result = call_by_call(torch_model(CALM), random_tokens(CALM, 3, 63), start_of(CALM), (5,), rows)
    assert_same(*result, *law(CALM, 63, scales), **EXACT)


def test_forward_and_step_are_the_law_with_full_steps_of_the_memories():
    tokens = random_tokens(TINY, 3, 19)
    forward = call_by_call(torch_model(TINY), tokens, start_of(TINY), (5,), None)
    for result in (forward, step_by_step(torch_model(TINY), tokens, start_of(TINY))):
        assert_same(*result, *law(TINY, 19), **EXACT)


@configs
def test_forward_in_float32_is_the_law_to_1e_4(config):
    model, state = torch_model(config, torch.float32), start_of(config, torch.float32)
    result = call_by_call(model, random_tokens(config, 3, 100), state, (37,), None)
    assert_same(*result, *law(config, 100), **SINGLE)


def step_by_step(model, tokens, state, adapt=None):
    """Logits and state of `step` over the tokens."""
    logits = []
    with torch.no_grad():
        for column in torch.from_numpy(tokens).unbind(1):
            out, state = hope_step.step(model, column, state, adapt)
            logits.append(out)
    return torch.stack(logits, 1).numpy(), to_arrays(state)


@configs
@pytest.mark.parametrize(("dtype", "bounds"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=["64", "32"])
def test_step_is_the_law(config, dtype, bounds):
    result = step_by_step(torch_model(config, dtype), random_tokens(config, 3, 63), start_of(config, dtype))
    assert_same(*result, *law(config, 63), **bounds)


@pytest.mark.parametrize("adapt", SETTINGS, ids=str)
def test_step_is_the_law_at_any_adapt(adapt):
    rows = torch.tensor([adapt], dtype=torch.float64).expand(3, 2)
    result = step_by_step(torch_model(CALM), random_tokens(CALM, 3, 63), start_of(CALM), rows)
    assert_same(*result, *law(CALM, 63, adapt), **EXACT)


def test_forward_leaves_the_given_state_alone():
    state = start_of(TINY)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    call_by_call(torch_model(TINY), random_tokens(TINY, 3, 25), state, (), None)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


def test_the_chunk_changes_speed_only():
    tokens = random_tokens(CALM, 3, 100)
    first, *others = (
        call_by_call(torch_model(CALM, chunk=chunk), tokens, start_of(CALM), (), None) for chunk in (64, 1, 7, 128)
    )
    for other in others:
        assert_same(*other, *first, **EXACT)


@configs
def test_an_untrained_model_is_a_model_of_the_law(config):
    torch.manual_seed(0)
    model, tokens = Hope(config).double(), random_tokens(config, 3, 25)
    expected = reference.run(parameters(model), config, tokens, random_state(config, batch=3, position=1))
    assert_same(*call_by_call(model, tokens, start_of(config), (), None), *expected, **EXACT)


def test_the_slow_and_the_fast_head_remember_for_8192_and_64_tokens():
    for n_head in (2, 4, 7):
        half_lives = -np.log(2) / F.logsigmoid(retention_bias(n_head).double()).numpy()
        np.testing.assert_allclose(half_lives[[0, -1]], HALF_LIVES, rtol=1e-4)
        np.testing.assert_allclose(np.diff(np.log(half_lives)), np.log(128) / (n_head - 1), rtol=1e-3)


@pytest.mark.parametrize("period", [1, 4, 100])
def test_cuts_fall_where_a_row_reaches_a_multiple_of_the_period(period):
    cuts = cut([3, 8], 13, period, torch.device("cpu"))
    expected = [[t for t in range(13) if (p + t) % period == 0] for p in (3, 8)]
    closed = [[start for start, _, closing in cuts if closing[row]] for row in range(2)]
    assert closed == expected
    assert [i for start, stop, _ in cuts for i in range(start, stop)] == list(range(13))


@pytest.mark.parametrize("profile", ["delta", "self_modifying"])
def test_40000_random_tokens_stay_finite_and_bounded_in_a_state_of_constant_size(profile):
    config = dataclasses.replace(TINY, layers=(profile,), memory_period=64, cms_periods=(64, 512), top_period=16)
    model, sizes, largest = torch_model(config, torch.float32, chunk=100), set(), []
    state = model.zeros()
    with torch.no_grad():
        for window in range(10):
            tokens = torch.from_numpy(random_tokens(config, 1, 4000, seed=window))
            logits, state = model(tokens, state)
            arrays = to_arrays(state)
            assert torch.isfinite(logits).all()
            sizes.add(arrays.nbytes)
            weights = [t for n, t in arrays.tensors.items() if n.partition(".")[2] in FAST_WEIGHTS]
            largest.append(max(float(np.abs(t).max()) for t in weights))
            assert np.linalg.norm(arrays.tensors["0.cms_g"], axis=(-2, -1)).max() <= 512
    assert sizes == {state_bytes(config)}
    assert max(largest) < 20
    assert max(largest[5:]) < 2 * max(largest[:5])


def at_chunk_starts(config: HopeConfig) -> dict[str, torch.Tensor]:
    """A random state whose rows stand at different multiples of the top level's period."""
    position = torch.tensor([0, 3, 7]) * config.top_period
    return start_of(config) | {"position": position}


@configs
def test_the_loss_is_the_cross_entropy_of_the_logits_and_leaves_their_state(config):
    model = torch_model(config)
    tokens = torch.from_numpy(random_tokens(config, 3, 41))
    with torch.no_grad():
        nats, state = model.loss(tokens[:, :-1], tokens[:, 1:], at_chunk_starts(config))
        logits, expected = model(tokens[:, :-1], at_chunk_starts(config))
    torch.testing.assert_close(
        nats, F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none"), rtol=0, atol=1e-10
    )
    assert_same(0, to_arrays(state), 0, to_arrays(expected), **EXACT)


@configs
def test_the_gradients_of_the_loss_are_those_of_autograd_with_the_teaching_signal_held_constant(config):
    tokens = torch.from_numpy(random_tokens(config, 3, 41))
    one, other = torch_model(config), torch_model(config)
    one.loss(tokens[:, :-1], tokens[:, 1:], at_chunk_starts(config))[0].mean().backward()
    # `forward` takes the top level's gradient g without recording it; all else is plain autograd.
    logits, _ = other(tokens[:, :-1], at_chunk_starts(config))
    F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]).backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_the_rows_of_the_loss_do_not_see_each_other():
    model, state = torch_model(TINY), at_chunk_starts(TINY)
    tokens = torch.from_numpy(random_tokens(TINY, 3, 41))
    with torch.no_grad():
        nats, after = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        for i in range(3):
            own = {name: tensor[i : i + 1] for name, tensor in state.items()}
            alone, alone_after = model.loss(tokens[i : i + 1, :-1], tokens[i : i + 1, 1:], own)
            expected = {name: tensor[i : i + 1] for name, tensor in after.items()}
            assert_same(alone, to_arrays(alone_after), nats[i : i + 1], to_arrays(expected), **EXACT)


@pytest.mark.parametrize(("start", "length"), [(0, 7), (3, 10)])
def test_the_loss_needs_whole_chunks_of_the_top_level(start, length):
    tokens = torch.from_numpy(random_tokens(TINY, 1, length + 1))
    model = torch_model(TINY)
    state = model.zeros() | {"position": torch.tensor([start])}
    with pytest.raises(AssertionError):
        model.loss(tokens[:, :-1], tokens[:, 1:], state)


def test_arrays_and_tensors_of_a_state_are_copies():
    arrays = random_state(batch=2)
    tensors = to_tensors(arrays)
    back = to_arrays(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert_same(0, back, 0, arrays, rtol=0, atol=0)
