"""Sliding-window transformers that the trainer and the scores take for a Hope: the baselines.

Pre-norm blocks of rotary attention over the last `WINDOW` tokens and a gated MLP, tied embedding. Keys
and values of the last window are their state, so text streams through them as through Hope. One is a
transformer and nothing else; the other has Hope's top level on it, so that what the blocks are worth shows.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl_runtime import recurrence as rec
from fednl_runtime.config import HopeConfig
from fednl_runtime.export.checkpoint import load_checkpoint, load_training
from fednl_runtime.export.data import find_sources, load_source
from fednl_runtime.export.train import Trainer, TrainSettings, set_up_torch
from fednl_runtime.hope import Hope, TopLevel, constant, normal
from fednl_runtime.recurrence import TensorDict
from fednl_runtime.server_api.commands.learn import HELD_OUT
from fednl_runtime.state import state_shapes

WINDOW = 512
"""Tokens that a token attends to, itself included."""


def size(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def hidden_width(c: HopeConfig, top_rank: int) -> int:
    """Width of the gated MLP that makes a transformer of this depth and width as large as the Hope."""
    with torch.device("meta"):
        total = size(Hope(c))
    top = top_rank * c.d_model + 2 * bool(top_rank)
    others = c.vocab_size * c.d_model + c.d_model + c.n_layer * (4 * c.d_model**2 + 2 * c.d_model) + top
    return (total - others) // (3 * c.d_model * c.n_layer)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of x `[B, H, T, h]` at positions `[T]`."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class TransformerBlock(nn.Module):
    """Parameters of one block."""

    def __init__(self, c: HopeConfig, hidden: int) -> None:
        super().__init__()
        d, depth = c.d_model, 2 * c.n_layer
        self.norm, self.mlp_norm = constant(1, d), constant(1, d)
        self.w_in = normal(3 * d, d)
        self.w_out = normal(d, d, std=(depth * d) ** -0.5)
        self.mlp_in = normal(2 * hidden, d)
        self.mlp_out = normal(d, hidden, std=(depth * hidden) ** -0.5)


class Transformer(Hope):
    """The baseline of a Hope of configuration `config`: as deep, as wide, and as large."""

    has_top = False

    def __init__(self, config: HopeConfig, compute: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.config = config if self.has_top else dataclasses.replace(config, top_rank=0)
        self.compute, self.softmax_error = compute, rec.softmax_error
        self.embedding = normal(config.vocab_size, config.d_model, std=0.02)
        hidden = hidden_width(config, self.config.top_rank)
        self.layers = nn.ModuleList(TransformerBlock(config, hidden) for _ in config.layers)
        self.norm = constant(1, config.d_model)
        if self.config.top_rank:
            self.top = TopLevel(config)

    def compile(self) -> None:
        """Fuse each block and the softmax with torch.compile."""
        for name in ("attend", "softmax_error"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def zeros(self, batch: int = 1) -> TensorDict:
        """The state of `batch` fresh sessions: keys and values of the tokens before."""
        c = self.config
        shape = (batch, c.n_head, WINDOW, c.d_head)
        state = {f"{i}.{n}": self.embedding.new_zeros(shape) for i in range(c.n_layer) for n in "kv"}
        top = {n: (batch, *s) for n, s in state_shapes(c).items() if n.startswith("top.")}
        state |= {n: self.embedding.new_zeros(s) for n, s in top.items()}
        return state | {"position": torch.zeros(batch, dtype=torch.int64)}

    def attend(self, x: Tensor, layer: TensorDict, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One block over x `[B, T, d]` with keys and values `[B, H, WINDOW, h]`: x and the new keys and values."""
        c = self.config
        length = x.shape[1]
        qkv = self.linear(self.rms_norm(x, layer["norm"]), layer["w_in"])
        q, k_new, v_new = qkv.unflatten(-1, (3, c.n_head, c.d_head)).permute(2, 0, 3, 1, 4)
        k, v = torch.cat([k, k_new], 2), torch.cat([v, v_new], 2)
        place = torch.arange(-WINDOW, length, device=x.device)
        dtype = self.compute or x.dtype
        read = F.scaled_dot_product_attention(
            rotate(q, place[WINDOW:]).to(dtype), rotate(k, place).to(dtype), v.to(dtype), mask
        )
        x = x + self.linear(read.to(x.dtype).transpose(1, 2).flatten(2), layer["w_out"])
        up, gate = self.linear(self.rms_norm(x, layer["mlp_norm"]), layer["mlp_in"]).chunk(2, -1)
        return x + self.linear(up * F.silu(gate), layer["mlp_out"]), k[:, :, length:], v[:, :, length:]

    def mask(self, position: Tensor, length: int) -> Tensor:
        """Which of the WINDOW + T keys each query may read: `[B, 1, T, WINDOW + T]`."""
        queries, keys = torch.arange(length)[:, None], torch.arange(-WINDOW, length)
        near = (keys <= queries) & (keys > queries - WINDOW)
        return near & (keys + position[:, None, None, None] >= 0)

    def body(self, tokens: Tensor, state: TensorDict, adapt: Tensor) -> tuple[Tensor, TensorDict]:
        """All blocks: tokens `[B, T]` -> normalised final hidden state `[B, T, d]`, and keys and values."""
        mask = self.mask(state["position"], tokens.shape[1])
        x, new = self.embedding[tokens], {}
        for i, layer in enumerate(self.layers):
            parameters = dict(layer.named_parameters())
            x, new[f"{i}.k"], new[f"{i}.v"] = self.attend(x, parameters, state[f"{i}.k"], state[f"{i}.v"], mask)
        return self.rms_norm(x, self.norm), new


class TransformerWithTop(Transformer):
    """The same with Hope's top level."""

    has_top = True


class BaselineTrainer(Trainer):
    """The product's trainer around a transformer."""

    model_class: type[Transformer] = Transformer

    def build(self) -> Hope:
        """The transformer of the run's configuration."""
        return self.model_class(self.config, torch.bfloat16 if self.settings.bf16 else None)


class TopTrainer(BaselineTrainer):
    """The same around a transformer with Hope's top level."""

    model_class = TransformerWithTop


@click.command()
@click.argument("corpus", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("hope", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/transformer"))
@click.option("--hours", type=click.FloatRange(0, 1e6), help="Time to train [default: that of HOPE].")
@click.option("--top", is_flag=True, help="With Hope's top level.")
def main(corpus: Path, hope: Path, output: Path, hours: float | None, top: bool) -> None:
    """Train the baseline of HOPE, a run's model.safetensors: same sources of CORPUS, tokenizer, size and time."""
    config, _, tokenizer = load_checkpoint(hope)
    training = load_training(hope)
    set_up_torch(None)
    paths = [p for p in find_sources(corpus) if f"{p.parent.name}/{p.name.split('.')[0]}" in training["sources"]]
    sources = [load_source(path, tokenizer, output / "tokens", HELD_OUT) for path in paths]
    settings = TrainSettings(hours or training["seconds"] / 3600, seed=training["settings"]["seed"], start=0)
    trainer = (TopTrainer if top else BaselineTrainer)(config, tokenizer, sources, settings, output)
    trainer.run(lambda _: None)
    click.echo(json.dumps(trainer.summary() | {"parameters": size(trainer.model)}))


if __name__ == "__main__":
    main()
