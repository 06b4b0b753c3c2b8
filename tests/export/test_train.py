"""Laws of training: it learns, it resumes as if it had never stopped, and refuses what is not its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
import torch
from engines import CONFIG, TOKENIZER, tiny_tokenizer_json
from models import random_tokens

from fednl_runtime.errors import CheckpointError, FednlError
from fednl_runtime.export import train
from fednl_runtime.export.checkpoint import load_checkpoint, load_training
from fednl_runtime.export.data import Source
from fednl_runtime.export.train import Trainer, TrainSettings, forget, learning_rate, optimizer, validate
from fednl_runtime.hope import Hope, parameters

SETTINGS = TrainSettings(
    hours=20 / 3600,
    batch=3,
    window=20,
    run=(40, 400),
    start=10,
    learning_rate=1e-2,
    warmup=5,
    bf16=False,
    compile=False,
)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock on which every step takes one second."""
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=itertools.count().__next__))


def source(period: int = 5, length: int = 900) -> Source:
    """The same few tokens over and over."""
    tokens = np.resize([*random_tokens(CONFIG, 1, period)[0], TOKENIZER.end_of_text], length).astype(np.uint16)
    return Source("d", "s", tokens[:-100], tokens[-100:])


def trainer(folder, config=CONFIG, settings=SETTINGS, sources=None) -> Trainer:
    return Trainer(config, tiny_tokenizer_json(), sources or [source()], settings, folder)


def assert_equal(one, other):
    """Nested containers and tensors are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    else:
        assert one == other


def test_the_loss_falls_on_a_text_that_repeats_itself(tmp_path):
    run = trainer(tmp_path, settings=dataclasses.replace(SETTINGS, hours=60 / 3600))
    losses = [run.timed_step().loss for _ in range(40)]
    assert losses[0] > 5
    assert np.mean(losses[-5:]) < 2.5


@pytest.mark.parametrize("change", [{"top_rank": 0}, {"cms_periods": ()}], ids=str)
def test_a_model_without_a_level_trains(change, tmp_path):
    run = trainer(tmp_path, dataclasses.replace(CONFIG, **change))
    losses = [run.timed_step().loss for _ in range(12)]
    assert losses[-1] < losses[0]


def test_a_run_that_stops_and_resumes_is_the_uninterrupted_run_bit_for_bit(tmp_path):
    whole, first = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    expected = [whole.timed_step() for _ in range(8)]
    steps = [first.timed_step() for _ in range(5)]
    first.save()
    second = trainer(tmp_path / "b")
    steps += [second.timed_step() for _ in range(3)]
    assert steps == expected
    assert_equal(second.model.state_dict(), whole.model.state_dict())
    assert_equal(second.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"])
    assert_equal(second.state, whole.state)


def test_a_run_stops_when_its_time_is_spent_and_logs_every_step(tmp_path):
    reported: list[train.Progress] = []
    trainer(tmp_path, settings=dataclasses.replace(SETTINGS, hours=4 / 3600)).run(reported.append)
    trainer(tmp_path, settings=dataclasses.replace(SETTINGS, hours=6 / 3600)).run(reported.append)
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [p.step for p in reported] == [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    assert [p.tokens for p in reported] == [60 * step for step in range(1, 7)]


def test_a_run_saves_its_weights_in_float16_with_their_story(tmp_path):
    run = trainer(tmp_path)
    run.timed_step()
    run.save()
    config, params, tokenizer_json = load_checkpoint(tmp_path / "model.safetensors")
    assert (config, tokenizer_json) == (CONFIG, tiny_tokenizer_json())
    for name, value in parameters(run.model).items():
        np.testing.assert_array_equal(params[name], value.astype(np.float16).astype(np.float32))
    training = load_training(tmp_path / "model.safetensors")
    assert (training["step"], training["tokens"], training["sources"]) == (1, 60, ["d/s"])


def test_a_run_of_another_configuration_is_not_resumed(tmp_path):
    trainer(tmp_path).save()
    with pytest.raises(CheckpointError, match="another configuration"):
        trainer(tmp_path, dataclasses.replace(CONFIG, d_cms=9))


def test_a_run_on_other_sources_is_not_resumed(tmp_path):
    trainer(tmp_path, sources=[source(), source(7)]).save()
    with pytest.raises(CheckpointError, match="other sources"):
        trainer(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "foreign"])
def test_a_damaged_run_is_not_resumed(damage, tmp_path):
    trainer(tmp_path).save()
    path = tmp_path / "resume.pt"
    contents = {"empty": b"", "garbage": b"hello world" * 9, "cut": path.read_bytes()[:-500]}
    torch.save([1, 2], path) if damage == "foreign" else path.write_bytes(contents[damage])
    with pytest.raises(CheckpointError, match=r"resume\.pt is damaged"):
        trainer(tmp_path)


def test_a_step_whose_gradient_is_not_finite_changes_no_weight(tmp_path):
    run = trainer(tmp_path)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.embedding.register_hook(lambda gradient: gradient * float("nan"))
    run.train_step()
    assert_equal(run.model.state_dict(), before)


def test_a_text_shorter_than_a_window_cannot_be_trained_on(tmp_path):
    with pytest.raises(FednlError, match="more than 20 tokens"):
        trainer(tmp_path, sources=[source(length=110)]).train_step()


def test_fresh_lanes_begin_with_an_empty_memory():
    state = {"s": torch.ones(3, 2, 2), "position": torch.tensor([5, 6, 7])}
    cleared = forget(state, torch.tensor([False, True, False]))
    assert cleared["position"].tolist() == [5, 0, 7]
    assert cleared["s"].sum((1, 2)).tolist() == [4, 0, 4]


def test_a_session_that_begins_half_a_window_in_trains_what_the_slower_levels_write(tmp_path):
    config = dataclasses.replace(CONFIG, cms_periods=(20,), top_rank=0)
    targets = slice(config.d_cms + config.cms_rank, None)
    norms = []
    for start in (0, 10):
        run = trainer(tmp_path / str(start), config, dataclasses.replace(SETTINGS, start=start))
        tokens = torch.ones(3, 20, dtype=torch.int64)
        nats, _ = run.model.loss(tokens, tokens, run.state | {"position": run.state["position"] + start})
        nats.mean().backward()
        norms.append(float(run.model.layers[0].cms_in.grad[0, targets].norm()))
        run.train_step()
        assert (run.state["position"] == 20 + start).all()
    assert norms[0] == 0
    assert norms[1] > 0


def test_the_learning_rate_warms_up_stays_and_falls_to_two_percent_at_the_end():
    settings = dataclasses.replace(SETTINGS, learning_rate=1.0, warmup=10, cool_down=0.2)
    assert learning_rate(settings, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(settings, 9, 0.0) == pytest.approx(1.0)
    assert learning_rate(settings, 99, 0.5) == learning_rate(settings, 99, 0.79) == pytest.approx(1.0)
    assert learning_rate(settings, 99, 0.9) == pytest.approx(0.51)
    assert learning_rate(settings, 99, 1.0) == learning_rate(settings, 99, 1.5) == pytest.approx(0.02)


def test_every_parameter_is_optimised_once_and_only_matrices_decay():
    model = Hope(CONFIG)
    groups = optimizer(model, SETTINGS).param_groups
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    assert all(p.dim() >= 2 for p in groups[0]["params"])
    assert groups[1]["weight_decay"] == 0


def test_validation_carries_the_memory_over_windows():
    torch.manual_seed(0)
    model = Hope(dataclasses.replace(CONFIG, eta_max=0.2))
    tail = random_tokens(CONFIG, 1, 101)[0].astype(np.uint16)
    sources = [Source("d", "long", tail, tail), Source("d", "short", tail, tail[:100])]
    found = validate(model, sources, length=100, window=20)
    tokens = torch.from_numpy(tail.astype(np.int64))[None]
    with torch.no_grad():
        nats, _ = model.loss(tokens[:, :-1], tokens[:, 1:], model.zeros())
    assert found == {"long": pytest.approx(float(nats.mean()), abs=1e-4)}
    assert validate(model, sources[1:], length=100) == {}
