"""Commands about learning rules: train them on a text of this device, and show a set of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.server_api.commands.learn import progress_bar
from fednl_runtime.server_api.commands.local import FILE, THREADS
from fednl_runtime.server_api.commands.model import print_json, print_table

if TYPE_CHECKING:
    from fednl_runtime.rule_training import RuleProgress, RuleReport, RuleSettings
    from fednl_runtime.rules import RuleSet

MODEL = click.option("--model", type=FILE, help="Model file [default: the shipped model].")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")


def a_number(_: click.Context, param: click.Parameter, value: float) -> float:
    """The value of an option, unless it is NaN, which passes every range. Raises click.BadParameter."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number.", param=param)
    return value


@click.group()
def rules() -> None:
    """Train the rules by which the memories of a model learn, and look at them."""


@rules.command()
@click.option("--text", type=FILE, required=True, help="Text to train on, plain or .xz; its end is held out.")
@click.option("--out", type=FILE, default=Path("rules.safetensors"), show_default=True, help="File to write.")
@MODEL
@click.option("--steps", type=click.IntRange(0), default=400, show_default=True, help="Steps to train at most.")
@click.option(
    "--minutes", type=click.FloatRange(0), callback=a_number, default=60.0, show_default=True,
    help="Time to train at most.",
)  # fmt: skip
@click.option(
    "--lr", type=click.FloatRange(0, 1, min_open=True), callback=a_number, default=3e-3, show_default=True,
    help="Step size of AdamW.",
)  # fmt: skip
@click.option(
    "--cpu-share", type=click.FloatRange(0.01, 1), callback=a_number, default=1.0, show_default=True,
    help="Share of the time to work in; the rest is slept.",
)  # fmt: skip
@THREADS
@JSON
def train(
    text: Path, out: Path, model: Path | None, steps: int, minutes: float, lr: float, cpu_share: float,
    threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Train rules on a TEXT, with onnxruntime alone: no torch, and the model's other weights stay as they are.

    The text is read in order with its memory carried on. Its last fifth is held out: the rules that are
    kept have the lowest streaming cross-entropy there. Use them with serve --rules or eval --rules.
    """
    from fednl_runtime.rule_training import RuleSettings

    settings = RuleSettings(steps=steps, minutes=minutes, learning_rate=lr, cpu_share=cpu_share)
    best, report = trained(text, model, threads, settings)
    best.save(out, {"fednl.training": json.dumps(report.to_dict())})
    summary = {"file": str(out), "file_bytes": out.stat().st_size, "schema": best.schema_hash, **report.to_dict()}
    print_json(summary) if as_json else print_table(f"Wrote {out}", in_words(report))


def trained(text: Path, model: Path | None, threads: int | None, settings: RuleSettings) -> tuple[RuleSet, RuleReport]:
    """Rules trained on a text file from those of the model, with a progress bar."""
    from fednl_runtime.corpus import encode_documents, read_text
    from fednl_runtime.gradient_backend import load_gradients
    from fednl_runtime.model_file import default_model_path
    from fednl_runtime.onnx_backend import load
    from fednl_runtime.rule_training import train_rules
    from fednl_runtime.tokenizer import Tokenizer

    path = model or default_model_path()
    gradients, backend = load_gradients(path, threads), load(path, threads)
    tokens = encode_documents(Tokenizer(backend.tokenizer_json, backend.config.vocab_size), read_text(text))
    with progress_bar("loss", "held_out") as bar:
        task = bar.add_task("Training rules", total=settings.steps, loss="", held_out="")

        def report(p: RuleProgress) -> None:
            bar.update(task, completed=p.step, loss=f"{p.loss:.3f} nats a token")
            if p.held_out is not None:
                bar.update(task, held_out=f"held out {p.held_out:.4f}")

        return train_rules(gradients, backend, gradients.defaults, tokens, settings, report)


def in_words(report: RuleReport) -> dict[str, str]:
    """The report as the rows of a table."""
    before, after = report.held_out_before, report.held_out_after
    return {
        "held-out cross-entropy": f"{before:.4f} -> {after:.4f} nats a token ({100 * (after / before - 1):+.2f} %)",
        "steps": f"{report.steps} ({report.skipped} skipped), best after {report.best_step}",
        "time": f"{report.seconds / 60:.1f} min, {report.ms_per_step:.0f} ms a step",
        "peak memory": f"{report.peak_rss_bytes / 1e6:.0f} MB",
    }


@rules.command()
@click.argument("file", type=FILE)
@MODEL
@JSON
def show(file: Path, model: Path | None, as_json: bool) -> None:
    """Describe the set of rules in FILE; with --model, check that it fits (exit code 3 when it does not)."""
    from fednl_runtime.onnx_backend import load
    from fednl_runtime.rules import load_rules

    found, notes = load_rules(file)
    if model:
        backend = load(model)
        found.require(backend.model.rules, backend.fingerprint)
    summary = {"file": file.name, "fingerprint": found.fingerprint, "schema": found.schema_hash}
    summary |= {name: json.loads(value) for name, value in ((n.removeprefix("fednl."), v) for n, v in notes.items())}
    described = {name: describe(value) for name, value in found.tensors.items()}
    if as_json:
        print_json({**summary, "rules": described})
    else:
        print_table(file.name, {**summary, **{name: in_a_line(rule) for name, rule in described.items()}})


def describe(value: Any) -> dict[str, Any]:
    """Shape, root mean square and range of a rule."""
    import numpy as np

    rms = float(np.sqrt(np.mean(np.square(value))))
    return {"shape": list(value.shape), "rms": rms, "min": float(value.min()), "max": float(value.max())}


def in_a_line(rule: dict[str, Any]) -> str:
    """A described rule as text."""
    shape = " x ".join(map(str, rule["shape"])) or "1"
    return f"{shape}, rms {rule['rms']:.4g}, from {rule['min']:.4g} to {rule['max']:.4g}"
