"""The ablations as a table: each arm against the shipped design, with its spread over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

BASE = "ddsd"
Rows = dict[str, dict[int, dict[str, Any]]]
"""Lines of the ablations by arm and seed."""


def read_rows(text: str, tokens: int, batch: int) -> Rows:
    """The lines of runs of that many tokens, in steps of that many windows."""
    rows: Rows = {}
    for row in map(json.loads, text.splitlines()):
        if (row["tokens"], row["batch"]) == (tokens, batch):
            rows.setdefault(row["arm"], {})[row["seed"]] = row
    return rows


def spread(values: list[float]) -> str:
    """Mean, and half the range if there is more than one value."""
    mean = f"{np.mean(values):+.2f}"
    return f"{mean} ± {np.ptp(values) / 2:.2f}" if len(values) > 1 else mean


def differences(rows: Rows, arm: str, field: str) -> list[float]:
    """Percent by which a field of the arm is above that of the base, for each seed that both have."""
    shared = sorted(set(rows[arm]) & set(rows[BASE]))
    return [100 * (rows[arm][seed][field] / rows[BASE][seed][field] - 1) for seed in shared]


def table(rows: Rows) -> str:
    """Markdown: seeds, parameters, `on` against the base, and `on` against `reset`, for seen and unseen domains."""
    lines = [
        "| arm | seeds | parameters | seen, `on` against ddsd, % | unseen | seen, `on` against `reset`, % | unseen |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, seeds in rows.items():
        against = [spread(differences(rows, arm, f"{group}_on")) if arm != BASE else "" for group in ("seen", "unseen")]
        own = [spread([row[f"{group}_on_vs_reset_percent"] for row in seeds.values()]) for group in ("seen", "unseen")]
        size = next(iter(seeds.values()))["parameters"]
        lines.append(f"| {arm} | {len(seeds)} | {size:,} | {' | '.join([*against, *own])} |")
    return "\n".join(lines)


@click.command()
@click.argument("lines", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=491_520, show_default=True, help="Tokens of the runs to compare.")
@click.option("--batch", default=8, show_default=True, help="Windows of their training steps.")
def main(lines: Path, tokens: int, batch: int) -> None:
    """Print the table of LINES, the output of the ablations."""
    click.echo(table(read_rows(lines.read_text(), tokens, batch)))


if __name__ == "__main__":
    main()
