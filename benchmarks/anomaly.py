"""Anomaly scoring of a log: a generated stream with injected faults, each line scored by its surprise.

Nothing is fitted: the log is read once, from an empty memory. With learning on the model knows after a while
what is normal here; the arms `reset` and `frozen` of `eval` show what that is worth. The last line printed is
a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from streams import read_arms

from fednl_runtime.evaluate import Surprise
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.state import Tokens
from fednl_runtime.tokenizer import Tokenizer

Labels = npt.NDArray[np.bool_]
Random = np.random.Generator
SERVICES = ("catalog", "checkout", "search", "profile")
PATHS = ("/", "/health", "/api/items", "/api/cart", "/api/search?q=lamp", "/static/site.css")
USERS = ("anna", "deploy", "marek", "olga")
WARM_UP = 200
"""Lines at the start without faults; they are not scored."""


def request(rng: Random) -> str:
    """A web request, most of them fine and fast."""
    status = rng.choice(["200", "200", "200", "200", "304", "404"])
    address = f"10.0.{rng.integers(4)}.{rng.integers(2, 60)}"
    return f"nginx: {address} GET {rng.choice(PATHS)} {status} {rng.integers(2, 40)}ms"


def job(rng: Random) -> str:
    """A scheduled job that reports what it did."""
    return f"cron: job rotate-{rng.choice(SERVICES)} finished, {rng.integers(20, 90)} files, exit 0"


def login(rng: Random) -> str:
    """A person logs in with a key."""
    port = rng.integers(40000, 60000)
    return f"sshd: accepted publickey for {rng.choice(USERS)} from 10.0.0.{rng.integers(2, 9)} port {port}"


def check(rng: Random) -> str:
    """A health check of a service."""
    return f"monitor: {rng.choice(SERVICES)} up, latency {rng.integers(2, 30)}ms, queue {rng.integers(0, 6)}"


def query(rng: Random) -> str:
    """A database report."""
    return f"postgres: checkpoint complete, wrote {rng.integers(100, 900)} buffers, {rng.integers(1, 9)} s"


NORMAL: tuple[Callable[[Random], str], ...] = (request, request, request, request, check, check, job, login, query)
FAULTS: dict[str, Callable[[Random], str]] = {
    "server error": lambda r: f"nginx: 10.0.1.{r.integers(2, 60)} GET {r.choice(PATHS)} 502 {r.integers(2, 40)}ms",
    "stranger": lambda r: f"sshd: accepted password for root from 185.{r.integers(1, 255)}.7.{r.integers(255)} port 22",
    "down": lambda r: f"monitor: {r.choice(SERVICES)} down, no answer after 5000ms, queue {r.integers(400, 900)}",
    "failed job": lambda r: f"cron: job rotate-{r.choice(SERVICES)} failed, disk full, exit 1",
    "disk": lambda r: f"kernel: I/O error on dev sda, sector {r.integers(10**6, 10**7)}",
    "deadlock": lambda r: f"postgres: deadlock detected, process {r.integers(1000, 9000)} waits for a lock",
}
"""Kinds of fault; the first differs from normal lines in a number only."""


def generate(count: int, share: float, rng: Random) -> tuple[list[str], list[str]]:
    """Lines of a log and the kind of fault of each, empty for a normal one; none in the warm-up."""
    lines, kinds, clock = [], [], 0.0
    for i in range(count):
        clock += rng.exponential(4.0)
        kind = str(rng.choice(list(FAULTS))) if i >= WARM_UP and rng.random() < share else ""
        time = f"{int(clock) // 3600 % 24:02}:{int(clock) // 60 % 60:02}:{int(clock) % 60:02}"
        lines.append(f"{time} {FAULTS[kind](rng) if kind else NORMAL[rng.integers(len(NORMAL))](rng)}\n")
        kinds.append(kind)
    return lines, kinds


def tokenise(tokenizer: Tokenizer, lines: list[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Tokens of the log after an end-of-text token, and the line of each but the first."""
    parts = [tokenizer.encode(line) for line in lines]
    owners = np.repeat(np.arange(len(lines)), [len(part) for part in parts])
    return np.array([tokenizer.end_of_text, *(token for part in parts for token in part)]), owners


def line_scores(scores: Surprise, owners: npt.NDArray[np.int64]) -> Surprise:
    """Nats of each line."""
    return np.bincount(owners, scores)


def average_precision(scores: Surprise, faulty: Labels) -> float:
    """Area under the precision-recall curve."""
    hits = faulty[np.argsort(-scores, kind="stable")]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())


def precision_at_faults(scores: Surprise, faulty: Labels) -> float:
    """Share of faults among as many alerts as there are faults: precision and recall at that threshold."""
    return float(faulty[np.argsort(-scores, kind="stable")[: faulty.sum()]].mean())


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--lines", default=1500, show_default=True)
@click.option("--share", default=0.02, show_default=True, help="Share of lines that are faults.")
@click.option("--seed", default=0, show_default=True)
def main(model: Path | None, lines: int, share: float, seed: int) -> None:
    """Generate a log, read it, and rank its lines by surprise."""
    backend = load(model or default_model_path(), threads=1)
    log, kinds = generate(lines, share, np.random.default_rng(seed))
    tokens, owners = tokenise(Tokenizer(backend.tokenizer_json, backend.config.vocab_size), log)
    faulty = np.array([kind != "" for kind in kinds])[WARM_UP:]
    report: dict[str, object] = {"lines": lines, "tokens": len(tokens), "faults": int(faulty.sum()), "seed": seed}
    for arm, scores in read_arms(backend, tokens, lambda _: None).items():
        ranked = line_scores(scores, owners)[WARM_UP:]
        limit = np.sort(ranked)[-int(faulty.sum())]
        found = {
            kind: float(np.mean([ranked[i] >= limit for i, k in enumerate(kinds[WARM_UP:]) if k == kind]))
            for kind in FAULTS
            if kind in kinds
        }
        report[arm] = {
            "average_precision": average_precision(ranked, faulty),
            "precision_and_recall": precision_at_faults(ranked, faulty),
            "recall_by_kind": found,
        }
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
