"""Training rules: AdamW as torch has it, the best rules kept, nothing learnt from what is not finite."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from models import TINY, random_params

from fednl_runtime import rule_training
from fednl_runtime.errors import RequestError
from fednl_runtime.export.graph import export_model
from fednl_runtime.export.rules_graph import export_rules
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.onnx_backend import load
from fednl_runtime.rule_training import AdamW, RuleSettings, clipped, train_rules, windows
from fednl_runtime.rules import RuleSet

CONFIG = dataclasses.replace(TINY, d_model=10, cms_periods=(4, 12), top_period=8, memory_period=4)
TARGET = np.array([1.0, -2.0, 0.5], np.float32)
SETTINGS = RuleSettings(steps=60, window=4, learning_rate=0.1, warmup=1, check_every=10)
TOKENS = np.arange(100) % 11


class Bowl:
    """Gradients of |rule - target|^2; records what it reads, and breaks at the steps it is told to."""

    config, segment = CONFIG, 4

    def __init__(self, broken=()):
        self.broken, self.read, self.positions = broken, [], []

    def step(self, rules, tokens, state):
        self.read.append(tokens.tolist())
        self.positions.append(int(state.position[0]))
        error = rules["rule.0.b_eta"] - TARGET
        value = math.nan if len(self.read) in self.broken else 1.0
        moved = dataclasses.replace(state, position=state.position + len(tokens) - 1)
        return value * float(error @ error), {"rule.0.b_eta": value * 2 * error}, moved


@pytest.fixture(name="bowl")
def bowl_fixture(monkeypatch):
    """The held-out loss of the bowl, without a model."""
    monkeypatch.setattr(rule_training, "held_out_loss", lambda _, rules, __: distance(rules["rule.0.b_eta"]))
    return Bowl()


def distance(value):
    return float(np.square(value - TARGET).sum())


def start():
    return RuleSet({"rule.0.b_eta": np.zeros(3, np.float32)}, "f" * 64)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_that_of_torch_with_decay_toward_the_start(decay):
    """torch decays to zero: so that its parameter is ours minus the start."""
    rng = np.random.default_rng(0)
    first = {"rule.0.r_eta": rng.normal(size=(3, 5)).astype(np.float32)}
    settings = RuleSettings(learning_rate=0.01, weight_decay=decay, warmup=1)
    ours, rules = AdamW(first, settings), first
    theirs = torch.zeros(3, 5, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=settings.betas, weight_decay=decay)
    for _ in range(20):
        gradient = rng.normal(size=(3, 5)).astype(np.float32)
        rules = ours.step(rules, {"rule.0.r_eta": gradient})
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
    moved = rules["rule.0.r_eta"] - first["rule.0.r_eta"]
    np.testing.assert_allclose(moved, theirs.detach().numpy(), atol=1e-6)
    assert rules["rule.0.r_eta"].dtype == np.float32


def test_a_gradient_is_scaled_to_the_largest_norm_over_all_rules():
    gradients = {"a": np.array([3.0], np.float32), "b": np.array([[4.0]], np.float32)}
    scaled, norm = clipped(gradients, 1.0)
    assert norm == 5
    assert (scaled["a"].item(), scaled["b"].item()) == pytest.approx((0.6, 0.8))
    assert clipped(gradients, 9.0)[0]["a"].item() == 3


def test_windows_overlap_by_the_token_that_is_target_and_next_input_and_start_again():
    found = [(window.tolist(), first) for window, first in itertools.islice(windows(np.arange(8), 3), 3)]
    assert found == [([0, 1, 2, 3], True), ([3, 4, 5, 6], False), ([0, 1, 2, 3], True)]


def test_rules_with_the_lowest_held_out_loss_are_returned(bowl):
    rules, report = train_rules(bowl, None, start(), TOKENS, SETTINGS)
    assert report.held_out_after == distance(rules.tensors["rule.0.b_eta"]) < 0.1 < report.held_out_before
    assert (report.steps, report.skipped, report.held_out_tokens, report.tokens) == (60, 0, 20, 240)
    assert rules.fingerprint == start().fingerprint


def test_the_memory_is_carried_through_the_text_and_cleared_where_it_begins_again(bowl):
    train_rules(bowl, None, start(), TOKENS, dataclasses.replace(SETTINGS, steps=25))
    assert bowl.positions == [*range(0, 76, 4), *range(0, 24, 4)]
    assert max(max(tokens) for tokens in bowl.read) == 10


def test_a_step_that_is_not_finite_is_skipped_counted_and_forgets_the_memory(bowl):
    bowl.broken = (2, 5)
    rules, report = train_rules(bowl, None, start(), TOKENS, SETTINGS)
    assert report.skipped == 2
    assert bowl.positions[:7] == [0, 4, 0, 4, 8, 0, 4]
    assert distance(rules.tensors["rule.0.b_eta"]) < 0.1


def test_rules_that_only_get_worse_leave_the_given_ones_after_some_patience(bowl, monkeypatch):
    losses = iter([1.0, 2.0, math.nan, 3.0, 4.0])
    monkeypatch.setattr(rule_training, "held_out_loss", lambda *_: next(losses))
    rules, report = train_rules(bowl, None, start(), TOKENS, SETTINGS)
    assert np.array_equal(rules.tensors["rule.0.b_eta"], np.zeros(3))
    assert (report.steps, report.best_step, report.held_out_after) == (30, 0, 1.0)


def test_work_takes_no_more_than_its_share_of_the_time(bowl, monkeypatch):
    slept = []
    monkeypatch.setattr(rule_training.time, "sleep", slept.append)
    _, report = train_rules(bowl, None, start(), TOKENS, dataclasses.replace(SETTINGS, cpu_share=0.25))
    assert sum(slept) == pytest.approx(3 * report.busy_seconds)


def test_no_time_trains_nothing(bowl):
    rules, report = train_rules(bowl, None, start(), TOKENS, dataclasses.replace(SETTINGS, minutes=0))
    assert (report.steps, report.held_out_after) == (0, report.held_out_before)
    assert np.array_equal(rules.tensors["rule.0.b_eta"], np.zeros(3))


def test_every_step_is_reported_with_the_held_out_loss_where_it_was_measured(bowl):
    seen = []
    train_rules(bowl, None, start(), TOKENS, SETTINGS, seen.append)
    assert [p.step for p in seen] == [*range(1, 61)]
    assert [p.step for p in seen if p.held_out is not None] == [10, 20, 30, 40, 50, 60]


def test_a_text_too_short_to_hold_something_out_is_refused(bowl):
    with pytest.raises(RequestError, match="Give at least 25"):
        train_rules(bowl, None, start(), TOKENS[:24], SETTINGS)
    train_rules(bowl, None, start(), TOKENS[:25], SETTINGS)


def test_a_model_learns_the_rules_of_a_text_through_onnxruntime_alone(tmp_path):
    params = random_params(CONFIG)
    export_model(params, CONFIG, "{}", tmp_path / "model.onnx")
    export_rules(params, CONFIG, tmp_path / "model.onnx")
    graph, backend = load_gradients(tmp_path / "model.onnx", 1), load(tmp_path / "model.onnx", 1)
    tokens = np.random.default_rng(0).choice([1, 2, 3, 3], 600)
    settings = RuleSettings(steps=40, window=16, learning_rate=0.03, check_every=20)
    rules, report = train_rules(graph, backend, graph.defaults, tokens, settings)
    assert report.held_out_after < 0.98 * report.held_out_before
    assert rules.schema_hash == graph.defaults.schema_hash
    assert report.peak_rss_bytes > 1e6
