"""What federation buys: clients of one domain each, five ways of learning, nats a token on text nobody trained on.

Arms with equal text and equal steps: `none`; `local` (each client trains its own rules); `fednl` (rules, through the
product's encoding and aggregation); `fedavg` (all weights) and `lora` (rank 8 on every matrix), both averaged in
float32. `own` is the mean over clients of streaming cross-entropy on a client's unseen text from an empty memory;
`others` the same of other clients' texts, and `known` of texts in the folder KNOWN: what is forgotten shows there.
Each line printed is a JSON object, the last one holds all.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fednl_runtime.corpus import encode_documents, read_text
from fednl_runtime.export.quantize import file_parameters
from fednl_runtime.fed_sync.aggregate import Member, Rule, aggregate
from fednl_runtime.fed_sync.device.local_training import Learnt, Terms, make_update
from fednl_runtime.fed_sync.optimize import ServerOptimizer
from fednl_runtime.fed_sync.update import Schema, decode
from fednl_runtime.gradient_backend import GradientGraph, load_gradients
from fednl_runtime.hope import Hope
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.rule_training import AdamW, RuleSettings, clipped
from fednl_runtime.rules import RuleSet
from fednl_runtime.state import MemoryState, Tokens
from fednl_runtime.tokenizer import Tokenizer

MATRICES = ("w_in", "w_out", "cms_in", "cms_out")
"""The linear layers of a block."""
RANK = 8
WINDOW = 512
"""Tokens of a step."""
Weights = dict[str, Tensor]
Evaluate = Callable[[list[Tokens]], list[float]]


class Text:
    """A client's text `[T]`: pieces to train on, one for each round, then text that nobody trains on."""

    def __init__(self, path: Path, tokenizer: Tokenizer, rounds: int, steps: int, unseen: int) -> None:
        tokens, need = encode_documents(tokenizer, read_text(path)), rounds * steps * WINDOW
        if len(tokens) < need + unseen + 2:
            raise click.ClickException(f"{path} has {len(tokens)} tokens; {need + unseen + 2} are needed.")
        self.name, self.unseen = path.name.split(".")[0], tokens[-unseen - 1 :]
        self.pieces = [tokens[i * steps * WINDOW : (i + 1) * steps * WINDOW + 1] for i in range(rounds)]

    def windows(self, number: int) -> Iterator[Tokens]:
        """The steps of a round: windows `[WINDOW + 1]`."""
        piece = self.pieces[number]
        for start in range(0, len(piece) - 1, WINDOW):
            yield piece[start : start + WINDOW + 1]


class LossOf(nn.Module):
    """The training loss of Hope as a module's forward pass, so that its weights can be given."""

    def __init__(self, model: Hope) -> None:
        super().__init__()
        self.hope = model

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Nats `[B, T]` of tokens `[B, T + 1]` after the first, and the next state."""
        return self.hope.loss(tokens[:, :-1], tokens[:, 1:], state)


class Torch:
    """The model in torch with given weights: training and evaluation of every arm."""

    def __init__(self, path: Path) -> None:
        params = file_parameters(path)
        self.model = Hope(load(path, 1).config)
        self.model.load_state_dict({n: torch.tensor(np.asarray(v, np.float32)) for n, v in params.items()})
        self.loss = LossOf(self.model)
        self.base: Weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def run(self, weights: Weights, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Nats `[B, T]` and the next state under some weights."""
        named = {f"hope.{name}": value for name, value in weights.items()}
        return functional_call(self.loss, named, (tokens, state))

    @torch.no_grad()
    def evaluate(self, weights: Weights, texts: list[Tokens]) -> list[float]:
        """Streaming cross-entropy of texts of equal length, side by side from empty memories."""
        tokens, state, total = torch.tensor(np.stack(texts)), self.model.zeros(len(texts)), torch.zeros(len(texts))
        for start in range(0, tokens.shape[1] - 1, WINDOW):
            nats, state = self.run(weights, tokens[:, start : start + WINDOW + 1], state)
            total += nats.sum(1)
        return (total / (tokens.shape[1] - 1)).tolist()

    def train(
        self, start: Weights, effective: Callable[[Weights], Weights], text: Text, number: int, lr: float
    ) -> Weights:
        """A client's steps of one round from trainable values `start`, which `effective` turns into weights."""
        values = {n: t.clone().requires_grad_() for n, t in start.items()}
        optimizer, state = torch.optim.AdamW(values.values(), lr, (0.9, 0.95), weight_decay=0.0), self.model.zeros()
        for window in text.windows(number):
            nats, state = self.run(effective(values), torch.tensor(window[None]), state)
            optimizer.zero_grad()
            nats.mean().backward()
            nn.utils.clip_grad_norm_(values.values(), 1.0)
            optimizer.step()
            state = {n: t.detach() for n, t in state.items()}
        return {n: t.detach() for n, t in values.items()}


def lora(base: Weights) -> tuple[Weights, Callable[[Weights], Weights]]:
    """Fresh low-rank factors of every matrix, and the weights that they make."""
    generator = torch.Generator().manual_seed(0)
    names = [n for n in base if n.rpartition(".")[2] in MATRICES]
    factors: Weights = {}
    for n in names:
        *levels, rows, columns = base[n].shape
        factors[f"{n}.a"] = torch.randn(*levels, RANK, columns, generator=generator) / math.sqrt(columns)
        factors[f"{n}.b"] = torch.zeros(*levels, rows, RANK)

    def effective(values: Weights) -> Weights:
        return {**base, **{n: base[n] + values[f"{n}.b"] @ values[f"{n}.a"] for n in names}}

    return factors, effective


def with_rules(base: Weights, rules: RuleSet) -> Weights:
    """The weights with other rules."""
    names = {n: n.replace("rule.", "" if ".top." in n else "layers.", 1) for n in rules.tensors}
    return {**base, **{own: torch.tensor(rules.tensors[n]).reshape(base[own].shape) for n, own in names.items()}}


def train_rules(graph: GradientGraph, rules: RuleSet, text: Text, number: int, lr: float) -> RuleSet:
    """A client's steps of one round on its rules, through the gradient graph."""
    optimizer = AdamW(rules.tensors, RuleSettings(learning_rate=lr, warmup=1, window=WINDOW))
    tensors, state = rules.tensors, MemoryState.zeros(graph.config)
    for window in text.windows(number):
        _, gradients, state = graph.step(tensors, window, state)
        tensors = optimizer.step(tensors, clipped(gradients, 1.0)[0])
    return RuleSet(tensors, rules.fingerprint)


class Run:
    """One simulation: texts, model, and the figures so far."""

    def __init__(self, texts: list[Text], known: list[Tokens], path: Path, settings: dict[str, Any]) -> None:
        self.texts, self.known, self.settings = texts, known, settings
        self.torch, self.graph = Torch(path), load_gradients(path, 1)
        self.results: dict[str, list[dict[str, Any]]] = {}
        backend = load(path, 1)
        self.schema = Schema(backend.model.rules, self.graph.defaults.schema_hash)

    def note(self, arm: str, number: int, models: list[Weights], up: int, down: int, **more: Any) -> None:
        """Measure the models after a round: one for all clients, or one for each."""
        began = time.monotonic()
        unseen = [text.unseen for text in self.texts]
        if len(models) == 1:
            own = self.torch.evaluate(models[0], unseen)
            others = own
        else:
            own = [self.torch.evaluate(m, [text])[0] for m, text in zip(models, unseen, strict=True)]
            others = self._others(models, unseen) if number == self.settings["rounds"] else []
        known = np.mean([self.torch.evaluate(m, self.known) for m in models[:3]], 0).tolist() if self.known else []
        found = {"arm": arm, "round": number, "own": own, "others": others, "known": known, "up": up, "down": down}
        found |= more
        self.results.setdefault(arm, []).append(found)
        told = {k: round(float(np.mean(v)), 4) if isinstance(v, list) and v else v for k, v in found.items()}
        click.echo(json.dumps({**told, "seconds": round(time.monotonic() - began)}))

    def _others(self, models: list[Weights], unseen: list[Tokens]) -> list[float]:
        """Each client's model on the texts of the next three clients."""
        count = len(unseen)
        chosen = [[unseen[(i + k) % count] for k in (1, 2, 3)] for i in range(count)]
        return [float(np.mean(self.torch.evaluate(m, texts))) for m, texts in zip(models, chosen, strict=True)]

    def none(self) -> None:
        """The model as it is."""
        self.note("none", self.settings["rounds"], [self.torch.base], 0, 0)

    def local(self) -> None:
        """Rules of each client's own."""
        rules = [self.graph.defaults for _ in self.texts]
        for number in range(self.settings["rounds"]):
            pairs = zip(rules, self.texts, strict=True)
            rules = [train_rules(self.graph, r, text, number, self.settings["lr_rules"]) for r, text in pairs]
        self.note("local", self.settings["rounds"], [with_rules(self.torch.base, r) for r in rules], 0, 0)

    def fednl(self) -> None:
        """Rules for all, through the product's updates and aggregation."""
        rules, state = self.graph.defaults, {}
        residuals: list[dict[str, Any]] = [{} for _ in self.texts]
        terms = Terms(self.settings["clip"], 0.0, 10**9)
        server = ServerOptimizer(self.settings["server"], self.settings["server_lr"])
        for number in range(self.settings["rounds"]):
            members, norms, up = [], [], 0
            for i, text in enumerate(self.texts):
                trained = train_rules(self.graph, rules, text, number, self.settings["lr_rules"])
                moved = self.schema.vector(trained.tensors) - self.schema.vector(rules.tensors)
                norms.append(float(np.linalg.norm(moved)))
                learnt = Learnt(trained, len(text.pieces[number]), 0.0, 0.0)
                rng = np.random.default_rng(0)
                _, encoded = make_update(
                    learnt, rules, number + 1, residuals[i], terms, "0.1.0", self.settings["encoding"], rng
                )
                residuals[i], up = encoded.residual, len(encoded.body)
                vector = self.schema.vector(decode(encoded.body, self.schema).delta)
                members.append(Member(f"{i:03}", vector, learnt.num_tokens))
            step, state = server.step(aggregate(members, Rule(), terms.clip_norm), state)
            rules = RuleSet(self.schema.tensors(self.schema.vector(rules.tensors) + step), rules.fingerprint)
            down = 4 * self.schema.size
            self.note("fednl", number + 1, [with_rules(self.torch.base, rules)], up, down, norm=float(np.mean(norms)))

    def averaged(self, arm: str, values: Weights, effective: Callable[[Weights], Weights], lr: float) -> None:
        """FedAvg of some trainable values."""
        size = 4 * sum(t.numel() for t in values.values())
        for number in range(self.settings["rounds"]):
            trained = [self.torch.train(values, effective, text, number, lr) for text in self.texts]
            values = {n: torch.stack([t[n] for t in trained]).mean(0) for n in values}
            self.note(arm, number + 1, [effective(values)], size, size)

    def fedavg(self) -> None:
        """All weights."""
        self.averaged("fedavg", self.torch.base, lambda values: values, self.settings["lr_weights"])

    def lora(self) -> None:
        """Low-rank factors of all matrices."""
        self.averaged("lora", *lora(self.torch.base), self.settings["lr_lora"])


def picture(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Mean cross-entropy on unseen text over the rounds, by arm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    none = float(np.mean(results["none"][0]["own"]))
    for arm, rounds in results.items():
        points = [(r["round"], float(np.mean(r["own"]))) for r in rounds]
        if len(points) == 1:
            axes.axhline(points[0][1], label=arm, linestyle=":" if arm == "none" else "--", color=f"C{len(arm)}")
        else:
            axes.plot(*zip((0, none), *points, strict=True), marker=".", label=arm)
    axes.set(xlabel="round", ylabel="nats a token on unseen text of the clients")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--known", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of known texts.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Model file [default: the shipped one].")
@click.option("--arms", default="none,fednl,local,lora,fedavg", show_default=True)
@click.option("--rounds", default=6, show_default=True)
@click.option("--steps", default=8, show_default=True, help="Steps of a client in a round, of 512 tokens.")
@click.option("--unseen", default=4096, show_default=True, help="Tokens of a client's unseen text.")
@click.option("--lr-rules", default=3e-3, show_default=True)
@click.option("--lr-weights", default=3e-4, show_default=True)
@click.option("--lr-lora", default=1e-3, show_default=True)
@click.option("--clip", default=1.0, show_default=True, help="Norm of a client's difference of rules.")
@click.option("--server", type=click.Choice(["none", "momentum", "adam"]), default="none", show_default=True)
@click.option("--server-lr", default=1.0, show_default=True)
@click.option("--encoding", default="int8", show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Picture to write.")
def main(folder: Path, known: Path | None, model: Path | None, arms: str, plot: Path | None, **settings: Any) -> None:
    """Run the arms one after the other."""
    torch.set_num_threads(1)
    path = model or default_model_path()
    backend = load(path, 1)
    tokenizer, sizes = Tokenizer(backend.tokenizer_json, backend.config.vocab_size), settings["unseen"]
    shape = settings["rounds"], settings["steps"], sizes
    texts = [Text(file, tokenizer, *shape) for file in sorted(folder.glob("*.txt*"))]
    files = sorted(known.rglob("*.txt*")) if known else []
    whole = [encode_documents(tokenizer, read_text(file)) for file in files]
    run = Run(texts, [tokens[: sizes + 1] for tokens in whole if len(tokens) > sizes], path, settings)
    for arm in arms.split(","):
        getattr(run, arm)()
    if plot:
        picture(run.results, plot)
    clients = [text.name for text in texts]
    click.echo(json.dumps({"clients": clients, "known": len(run.known), "settings": settings, "results": run.results}))


if __name__ == "__main__":
    main()
