"""Training speed: tokens a second of the shipped mix and of delta blocks alone, eager and compiled.

Each arm takes whole optimiser steps on 16 lanes of 512 random tokens; the figure is that of the fastest
of its timed steps. The last line printed is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.metadata import version

import click
import torch

from fednl_runtime.config import HopeConfig
from fednl_runtime.export.train import TrainSettings, optimizer, set_up_torch
from fednl_runtime.hope import Hope

SHIPPED = HopeConfig(4096)
DELTA = dataclasses.replace(SHIPPED, layers=("delta",) * SHIPPED.n_layer)


def tokens_per_second(config: HopeConfig, compute: torch.dtype | None, compiled: bool, steps: int) -> float:
    """Speed of the fastest of `steps` training steps, after two that warm up."""
    settings = TrainSettings()
    torch.manual_seed(settings.seed)
    model = Hope(config, compute)
    if compiled:
        model.compile()
    adam, state = optimizer(model, settings), model.zeros(settings.batch)
    tokens = torch.randint(0, config.vocab_size, (settings.batch, settings.window + 1))
    times = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        nats, new = model.loss(tokens[:, :-1], tokens[:, 1:], state)
        nats.mean().backward()
        adam.step()
        adam.zero_grad()
        state = {name: tensor.detach().contiguous() for name, tensor in new.items()}
        times.append(time.perf_counter() - start)
    return settings.batch * settings.window / min(times[2:])


@click.command()
@click.option("--steps", default=3, show_default=True, help="Timed steps of each arm.")
def main(steps: int) -> None:
    """Time training steps; the compiled arm takes minutes to start."""
    arms = {
        "delta_fp32": (DELTA, None, False),
        "delta_bf16": (DELTA, torch.bfloat16, False),
        "shipped_fp32": (SHIPPED, None, False),
        "shipped_bf16": (SHIPPED, torch.bfloat16, False),
        "shipped_bf16_compiled": (SHIPPED, torch.bfloat16, True),
    }
    rates = {}
    for name, (config, compute, compiled) in arms.items():
        if compiled:
            set_up_torch(None)
        rates[name] = tokens_per_second(config, compute, compiled, steps)
        click.echo(f"{name}: {rates[name]:,.0f} tokens/s")
    click.echo(json.dumps({"tokens_per_second": rates, "threads": torch.get_num_threads(), "torch": version("torch")}))


if __name__ == "__main__":
    main()
