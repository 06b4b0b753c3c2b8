"""The curve of a training run: loss against tokens, from its log.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

SMOOTH = 50
"""Steps in the running mean: a step holds one window of each lane, so single steps vary with the sources."""


@click.command()
@click.argument("log", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("training.png"), show_default=True)
def main(log: Path, output: Path) -> None:
    """Draw the training LOG and print its last running mean."""
    rows: list[dict[str, float]] = []
    for line in log.read_text().splitlines():
        row = json.loads(line)
        rows = rows[: row["step"] - 1]  # a run that went on from a checkpoint took these steps again
        rows.append(row)
    millions = np.array([row["tokens"] for row in rows]) / 1e6
    losses = np.array([row["loss"] for row in rows])
    mean = np.convolve(losses, np.ones(SMOOTH) / SMOOTH, "valid")
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axis.plot(millions, losses, color="#c9d6d2", linewidth=0.6, label="one step")
    axis.plot(millions[SMOOTH - 1 :], mean, color="#0b6e4f", linewidth=1.4, label=f"mean of {SMOOTH} steps")
    axis.set(xlabel="million tokens", ylabel="nats a token", ylim=(mean.min() - 0.5, mean.max()))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(output, dpi=110)
    report = {"steps": len(rows), "tokens": rows[-1]["tokens"], "seconds": rows[-1]["seconds"], "loss": mean[-1]}
    click.echo(json.dumps(report | {"tokens_per_second": np.median([row["tokens_per_second"] for row in rows])}))


if __name__ == "__main__":
    main()
