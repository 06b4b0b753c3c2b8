"""Laws of the comparison: a checkpoint opens as what it is, and only files that all models read count."""

from __future__ import annotations

import dataclasses

import baselines
import numpy as np
import torch
from baselines import BaselineTrainer, TopTrainer, Transformer, TransformerWithTop
from compare import averages, open_checkpoint
from engines import CONFIG, tiny_tokenizer_json

from fednl_runtime.export.data import Source
from fednl_runtime.export.train import Trainer, TrainSettings
from fednl_runtime.hope import Hope

EVEN = dataclasses.replace(CONFIG, d_model=8, d_cms=16)
SETTINGS = TrainSettings(batch=2, window=20, run=(40, 80), start=0, bf16=False, compile=False)


def test_a_checkpoint_opens_as_the_model_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "WINDOW", 8)
    tokens = np.arange(300, dtype=np.uint16) % CONFIG.vocab_size
    trainers = ((Hope, Trainer), (Transformer, BaselineTrainer), (TransformerWithTop, TopTrainer))
    for name, (kind, trainer) in zip("abc", trainers, strict=True):
        run = trainer(EVEN, tiny_tokenizer_json(), [Source("d", "s", tokens, tokens[:0])], SETTINGS, tmp_path / name)
        run.train_step()
        run.save()
        model, tokenizer = open_checkpoint(tmp_path / name / "model.safetensors")
        assert type(model) is kind
        assert tokenizer == tiny_tokenizer_json()
        assert torch.allclose(model.embedding, run.model.embedding, atol=1e-3)


def test_only_files_that_are_long_enough_count():
    short = {name: {"on": {8: 1.0}, "reset": {8: 2.0}} for name in ("a", "b")}
    long = {name: {"on": {8: 3.0, 32: 5.0}, "reset": {8: 4.0, 32: 6.0}} for name in ("a", "b")}
    assert averages({"x": short, "y": long}, 8) == {name: {"on": 2.0, "reset": 3.0} for name in ("a", "b")}
    assert averages({"x": short, "y": long}, 32) == {name: {"on": 5.0, "reset": 6.0} for name in ("a", "b")}
    assert averages({"x": short}, 32) == {}
