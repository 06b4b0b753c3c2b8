"""Ablations at reduced size: train each arm on the same tokens, score it on held-out text, one JSON line an arm.

Two domains are left out of training and scored too. Arms that the output file holds already are skipped,
so a stopped queue goes on where it was. Speeds of arms that ran on a shared machine do not compare:
`--speed` measures them interleaved. The last line printed is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from scoring import carried, cut_short
from variants import Variant, variants

from fednl_runtime.export.data import Source, find_sources, load_source
from fednl_runtime.export.train import Trainer, TrainSettings, learning_rate, set_up_torch
from fednl_runtime.hope import Hope

LEFT_OUT = ("law", "tech_perl")
SCORED = (
    "cpython_stdlib", "jane_austen", "world_factbook", "hl7_fhir_r4_definitions", "web_bible", "postgresql15_doc",
    "licence_texts", "perl_doc",
)  # fmt: skip
"""Sources whose held-out ends are scored; the last two belong to the domains left out."""

LENGTH = 8192
ARMS = {"on": carried, "reset": cut_short}


class Trial(Trainer):
    """A run of one arm: the trainer of the product with the arm's model and a schedule that counts steps."""

    def __init__(
        self, variant: Variant, tokenizer: str, sources: list[Source], seed: int, batch: int, folder: Path
    ) -> None:
        self.variant = variant
        settings = TrainSettings(
            batch=batch, warmup=160 // batch, cool_down=0.4, seed=seed, start=variant.start, run=(4096, 32768),
            learning_rate=4e-3,
        )  # fmt: skip
        super().__init__(variant.config, tokenizer, sources, settings, folder)

    def build(self) -> Hope:
        """The arm's model."""
        return self.variant.model(self.config, torch.bfloat16)

    def steps(self, count: int) -> list[float]:
        """Losses of `count` steps, the whole schedule."""
        losses = []
        for step in range(count):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step, step / count)
            losses.append(self.train_step()[0])
        return losses

    def trained(self) -> Hope:
        """The model in full precision, as the scores read it."""
        plain = self.variant.model(self.config)
        plain.load_state_dict(self.model.state_dict())
        return plain


def by_thousands(losses: list[float], tokens: int, every: int = 100_000) -> list[float]:
    """Mean loss of each 100,000 tokens."""
    count = every // tokens
    return [round(statistics.mean(losses[i : i + count]), 4) for i in range(0, len(losses), count)]


def score(model: Hope, tokens: torch.Tensor) -> dict[str, list[float]]:
    """Nats a token of each row and arm."""
    torch.set_float32_matmul_precision("highest")
    result = {name: [round(float(x), 4) for x in arm(model, tokens).mean(1)] for name, arm in ARMS.items()}
    torch.set_float32_matmul_precision("medium")
    return result


def averages(scores: dict[str, list[float]]) -> dict[str, float]:
    """Mean of `on`, and how much lower it is than the other arms in percent, for seen and unseen domains."""
    seen = len(SCORED) - len(LEFT_OUT)
    result = {}
    for group, rows in (("seen", slice(seen)), ("unseen", slice(seen, None))):
        on, reset = (np.array(scores[name][rows]) for name in ARMS)
        result[f"{group}_on"] = float(on.mean())
        result[f"{group}_reset"] = float(reset.mean())
        result[f"{group}_on_vs_reset_percent"] = 100 * float((on / reset).mean() - 1)
    return {name: round(value, 4) for name, value in result.items()}


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all arms share: the tokenizer, the training sources, the held-out tokens and the windows of a step."""

    tokenizer: str
    sources: list[Source]
    held_out: torch.Tensor
    batch: int

    @classmethod
    def load(cls, corpus: Path, tokenizer: Path, cache: Path, batch: int) -> Bench:
        """Read the corpus with a given tokenizer."""
        text = tokenizer.read_text("utf-8")
        sources = [load_source(path, text, cache, LENGTH + 1) for path in find_sources(corpus)]
        by_name = {source.name: source for source in sources}
        rows = np.stack([by_name[name].validation[: LENGTH + 1].astype(np.int64) for name in SCORED])
        return cls(text, [s for s in sources if s.domain not in LEFT_OUT], torch.from_numpy(rows), batch)

    def trial(self, variant: Variant, seed: int, folder: str) -> Trial:
        """A fresh run of an arm."""
        return Trial(variant, self.tokenizer, self.sources, seed, self.batch, Path(folder))

    def run(self, name: str, variant: Variant, seed: int, tokens: int) -> dict[str, Any]:
        """Train and score one arm: its line of the output."""
        torch.compiler.reset()  # compiled functions of other arms count against one limit
        with tempfile.TemporaryDirectory() as folder:
            trial = self.trial(variant, seed, folder)
            size = trial.settings.batch * trial.settings.window
            start = time.monotonic()
            losses = trial.steps(tokens // size)
            seconds = time.monotonic() - start
            scores = score(trial.trained(), self.held_out)
        row = {"arm": name, "seed": seed, "tokens": tokens // size * size, "batch": self.batch}
        row["seconds"] = round(seconds)
        row["parameters"] = sum(p.numel() for p in trial.model.parameters())
        return row | averages(scores) | {"loss": by_thousands(losses, size), "scores": scores}

    def speeds(self, arms: dict[str, Variant], rounds: int) -> dict[str, float]:
        """Training tokens a second of each arm: the median of interleaved steps in one process."""
        with tempfile.TemporaryDirectory() as folder:
            trials = {name: self.trial(arm, 1, f"{folder}/{name}") for name, arm in arms.items()}
            for trial in trials.values():
                trial.steps(3)
            times = {name: [seconds_of_step(trial) for trial in [trials[name]]] for name in trials}
            for _ in range(rounds):
                for name, trial in trials.items():
                    times[name].append(seconds_of_step(trial))
        size = self.batch * 512
        return {name: size / statistics.median(values[1:]) for name, values in times.items()}


def seconds_of_step(trial: Trial) -> float:
    """Wall time of one training step."""
    start = time.perf_counter()
    trial.train_step()
    return time.perf_counter() - start


def finished(output: Path) -> set[tuple[str, int, int, int]]:
    """(arm, seed, tokens, batch) of the lines that the output holds."""
    lines = output.read_text().splitlines() if output.exists() else []
    return {(row["arm"], row["seed"], row["tokens"], row["batch"]) for row in map(json.loads, lines)}


@click.command()
@click.argument("corpus", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("queue", nargs=-1)
@click.option(
    "--tokenizer", type=click.Path(exists=True, path_type=Path), required=True, help="A run's tokenizer.json."
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/ablations.jsonl"), show_default=True)
@click.option("--tokens", default=491_520, show_default=True, help="Tokens to train each arm on.")
@click.option("--batch", default=8, show_default=True, help="Windows of a training step.")
@click.option("--speed", is_flag=True, help="Measure training speeds of the arms instead.")
def main(
    corpus: Path, queue: tuple[str, ...], tokenizer: Path, output: Path, tokens: int, batch: int, speed: bool
) -> None:
    """Run the arms in QUEUE (`NAME` or `NAME:SEED`) on CORPUS, a folder as `fednl-runtime train` reads it."""
    set_up_torch(None)
    bench = Bench.load(corpus, tokenizer, output.parent / "tokens", batch)
    arms = variants()
    if speed:
        report: dict[str, Any] = {"tokens_per_second": bench.speeds({name: arms[name] for name in queue}, 5)}
    else:
        done = finished(output)
        for item in queue:
            name, _, seed = item.partition(":")
            if (name, int(seed or 1), tokens, batch) not in done:
                row = bench.run(name, arms[name], int(seed or 1), tokens)
                with output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                click.echo(json.dumps({k: v for k, v in row.items() if k not in ("loss", "scores")}))
        report = {"arms": len(queue), "output": output.name}
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
