"""Hope in torch: the literal step, the chunked forward pass, and the training loss."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednl_runtime import recurrence as rec
from fednl_runtime.config import INPUTS, MEMORIES, HopeConfig
from fednl_runtime.recurrence import TensorDict, unit
from fednl_runtime.state import MemoryState, state_shapes

HALF_LIVES = (64.0, 8192.0)
"""Half-life in tokens of the fastest and the slowest head's memory at initialisation."""


def normal(*shape: int, std: float | None = None) -> nn.Parameter:
    """A parameter drawn from N(0, std^2); without `std`, from N(0, 1 / fan-in)."""
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std))


def constant(value: float, *shape: int) -> nn.Parameter:
    """A parameter filled with one value."""
    return nn.Parameter(torch.full(shape, float(value)))


def retention_bias(n_head: int) -> Tensor:
    """b_alpha `[H]` whose retentions sigmoid(b) have half-lives spaced evenly on a log scale."""
    half_lives = torch.logspace(math.log2(HALF_LIVES[0]), math.log2(HALF_LIVES[1]), n_head, base=2)
    retention = 2 ** (-1 / half_lives.double())
    return torch.logit(retention).float()


class Block(nn.Module):
    """Parameters of one block; the names are those of `reference.step`."""

    def __init__(self, c: HopeConfig, profile: str) -> None:
        super().__init__()
        d, h = c.d_model, c.n_head
        self.norm = constant(1, d)
        self.w_in = normal((len(INPUTS) + 1) * d, d)
        self.conv = normal(len(INPUTS) * d, c.d_conv, std=0.1)
        self.conv.data[:, -1] += 1
        self.r_eta, self.b_eta = normal(h, c.d_head), constant(0, h)
        self.r_alpha, self.b_alpha = normal(h, c.d_head, std=0.1 * c.d_head**-0.5), nn.Parameter(retention_bias(h))
        if profile == "self_modifying":
            heads = len(MEMORIES) * h
            self.w1_init = normal(heads, c.d_memory, c.d_head, std=1e-3)
            self.w2_init = normal(heads, c.d_head, c.d_memory, std=c.d_head**-0.5)
        self.head_norm = constant(1, h, c.d_head)
        self.w_out = normal(d, d, std=(2 * c.n_layer * d) ** -0.5)
        if c.n_cms:
            depth = 2 * c.n_layer * c.n_cms
            self.cms_norm = constant(1, c.n_cms, d)
            self.cms_in = normal(c.n_cms, c.d_cms + c.cms_rank + d, d)
            self.cms_out = normal(c.n_cms, d, c.d_cms, std=(depth * c.d_cms) ** -0.5)
            self.cms_step, self.cms_decay = constant(-1, c.n_cms), constant(4, c.n_cms)

    def tensors(self) -> TensorDict:
        """The parameters by name."""
        return dict(self.named_parameters())


class TopLevel(nn.Module):
    """Rules of the top level: projection P, step size and decay."""

    def __init__(self, c: HopeConfig) -> None:
        super().__init__()
        self.p = normal(c.top_rank, c.d_model)
        self.step, self.decay = constant(-1), constant(7)


Cuts: TypeAlias = list[tuple[int, int, Tensor]]
"""Where a level's pieces of a call start and stop, and the rows `[B]` that close a chunk at the start."""


def cut(position: list[int], length: int, period: int, device: torch.device) -> Cuts:
    """Cut a call of `length` tokens where any row reaches a multiple of `period`."""
    starts = sorted({0, *(t for p in set(position) for t in range(-p % period, length, period))})
    closing = [torch.tensor([(p + start) % period == 0 for p in position], device=device) for start in starts]
    return list(zip(starts, [*starts[1:], length], closing, strict=True))


class Hope(nn.Module):
    """A Hope language model (arXiv 2512.24695, section 8) with an exact-gradient top level.

    State travels as a dict of tensors named as in `state.state_shapes` plus `position` `[B]` int64.
    """

    def __init__(self, config: HopeConfig, compute: torch.dtype | None = None, chunk: int = 64) -> None:
        """`compute` is the type of the large products (bfloat16 when training); `chunk` only sets the speed."""
        super().__init__()
        self.config, self.compute, self.chunk = config, compute, chunk
        self.embedding = normal(config.vocab_size, config.d_model, std=0.02)
        self.layers = nn.ModuleList(Block(config, profile) for profile in config.layers)
        self.norm = constant(1, config.d_model)
        if config.top_rank:
            self.top = TopLevel(config)
        self.delta, self.self_modifying, self.softmax_error = rec.delta, rec.self_modifying, rec.softmax_error

    def compile(self) -> None:
        """Fuse the parts of a block with torch.compile: minutes of start-up, twice the speed in training."""
        for name in ("project", "delta", "self_modifying", "read_out", "cms", "softmax_error"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def zeros(self, batch: int = 1) -> TensorDict:
        """The state of `batch` fresh sessions."""
        like = self.embedding
        state = {n: like.new_zeros(batch, *shape) for n, shape in state_shapes(self.config).items()}
        return state | {"position": torch.zeros(batch, dtype=torch.int64)}

    def adapt(self, batch: int) -> Tensor:
        """Default scales `[B, 2]`: everything learns."""
        return self.embedding.new_ones(batch, 2)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T in the compute type, returned in the type of x."""
        if self.compute is None:
            return F.linear(x, weight)
        return F.linear(x.to(self.compute), weight.to(self.compute)).to(x.dtype)

    def rms_norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm over the last axis."""
        return F.rms_norm(x, gain.shape[-1:], eps=self.config.norm_eps) * gain

    def project(self, x: Tensor, layer: TensorDict, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs u of the memories `[4, B, H, T, h]`, output gate z `[B, T, d]` and the convolution's new tail."""
        c = self.config
        projected = self.linear(self.rms_norm(x, layer["norm"]), layer["w_in"])
        u, z = projected.split([len(INPUTS) * c.d_model, c.d_model], -1)
        window = torch.cat([tail, u], 1)
        taps = layer["conv"].T.contiguous()
        first, *others = (window[:, j : j + x.shape[1]] * taps[j] for j in range(c.d_conv))
        u = sum(others, first)
        u = unit(u.unflatten(-1, (len(INPUTS), c.n_head, c.d_head)), c.norm_eps).permute(2, 0, 3, 1, 4)
        return u.contiguous(), z, window[:, x.shape[1] :]

    def read_out(self, y: Tensor, z: Tensor, layer: TensorDict) -> Tensor:
        """What the memories' reads y `[B, H, T, h]` add to the residual stream."""
        y = self.rms_norm(y.transpose(1, 2), layer["head_norm"]).flatten(2) * F.silu(z)
        return self.linear(y, layer["w_out"])

    def mixer(
        self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: Cuts, adapt: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """Memory mixer over x `[B, T, d]`: what is added to the residual stream, and the new state."""
        c = self.config
        u, z, tail = self.project(x, layer, state["conv"])
        if "s" in state:
            k, v, q, g = u
            y, s = self.delta(q, k, v, *rec.gates(layer, g, g, adapt, c), state["s"], self.chunk)
            return self.read_out(y, z, layer), {"conv": tail, "s": s}
        state = {n: state[n] for n in ("w1_boundary", "w2_boundary", "w1", "w2")}
        memories = {n: layer[n] for n in ("r_eta", "b_eta", "r_alpha", "b_alpha", "w1_init", "w2_init")}
        outputs = []
        for start, stop, closing in cuts:
            y, state = self.self_modifying(u[:, :, :, start:stop].unbind(0), memories, state, adapt, closing, c)
            outputs.append(y)
        return self.read_out(torch.cat(outputs, 2), z, layer), {"conv": tail, **state}

    def cms(
        self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: list[Cuts], adapt: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """Continuum Memory System over x `[B, T, d]`, fastest level first."""
        c = self.config
        new: dict[str, list[Tensor]] = {"cms_f": [], "cms_a": [], "cms_g": []}
        steps, decays = torch.sigmoid(layer["cms_step"]), torch.sigmoid(layer["cms_decay"])
        for i, period in enumerate(c.cms_periods):
            h = self.linear(self.rms_norm(x, layer["cms_norm"][i]), layer["cms_in"][i])
            up, p, t = h.split([c.d_cms, c.cms_rank, c.d_model], -1)
            p = unit(p, c.norm_eps)
            f, a, g = state["cms_f"][:, i], state["cms_a"][:, i], state["cms_g"][:, i]
            reads = []
            for start, stop, closing in cuts[i]:
                f, a, g = rec.cms_close(f, a, g, steps[i] / period, decays[i], adapt, closing)
                keys = p[:, start:stop]
                reads.append(keys @ f)
                weighted = (adapt[:, 1, None, None] * keys).transpose(1, 2)
                a, g = a + weighted @ t[:, start:stop], g + weighted @ keys
            x = x + self.linear(F.silu(up), layer["cms_out"][i]) + torch.cat(reads, 1)
            for name, value in zip(new, (f, a, g), strict=True):
                new[name].append(value)
        return x, {name: torch.stack(values, 1) for name, values in new.items()}

    def block(
        self, x: Tensor, layer: TensorDict, state: TensorDict, cuts: list[Cuts], adapt: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """Mixer, then CMS; `cuts` are those of the memories and of each CMS level."""
        added, new = self.mixer(x, layer, state, cuts[0], adapt)
        if not self.config.n_cms:
            return x + added, new
        x, levels = self.cms(x + added, layer, state, cuts[1:], adapt)
        return x, new | levels

    def body(self, tokens: Tensor, state: TensorDict, adapt: Tensor) -> tuple[Tensor, TensorDict]:
        """All blocks: tokens `[B, T]` -> normalised final hidden state `[B, T, d]` and the layers' state."""
        c = self.config
        position = state["position"].tolist()
        periods = (c.memory_period, *c.cms_periods)
        cuts = [cut(position, tokens.shape[1], period, tokens.device) for period in periods]
        x = F.embedding(tokens, self.embedding)
        new: TensorDict = {}
        for i, block in enumerate(self.layers):
            assert isinstance(block, Block)
            own = {n.removeprefix(f"{i}."): t for n, t in state.items() if n.startswith(f"{i}.")}
            x, mixed = self.block(x, block.tensors(), own, cuts, adapt)
            new |= {f"{i}.{n}": t for n, t in mixed.items()}
        return self.rms_norm(x, self.norm), new

    def top_rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """(eps, lambda, norm cap) of the top level, relative to the embedding's mean square norm."""
        power = self.embedding.detach().double().square().sum().to(self.embedding.dtype) / self.config.vocab_size
        return (
            2 * torch.sigmoid(self.top.step) / power,
            torch.sigmoid(self.top.decay),
            self.config.norm_cap / power.sqrt(),
        )

    def top_close(self, state: TensorDict, tokens: Tensor, adapt: Tensor, closing: Tensor) -> Tensor:
        """F after the pending chunk's exact gradient, if it closes; `tokens [B]` is the last target."""
        if not closing.any():
            return state["top.f"]
        targets = torch.cat([state["top.token"][:, 1:].long(), tokens[:, None]], 1)
        _, g, _ = self.next_token(state["top.h"], self.embedding, targets)
        return rec.top_step(state["top.f"], state["top.p"].transpose(1, 2) @ g, *self.top_rates(), adapt, closing)

    def forward(self, tokens: Tensor, state: TensorDict, adapt: Tensor | None = None) -> tuple[Tensor, TensorDict]:
        """Logits `[B, T, V]` and the next state for tokens `[B, T]`; rows may be at any position."""
        adapt = self.adapt(len(tokens)) if adapt is None else adapt
        h, new = self.body(tokens, state, adapt)
        if self.config.top_rank:
            h, levels = self.read_top(h, tokens, state, adapt)
            new |= levels
        return h @ self.embedding.T, new | {"position": state["position"] + tokens.shape[1]}

    def read_top(self, h: Tensor, tokens: Tensor, state: TensorDict, adapt: Tensor) -> tuple[Tensor, TensorDict]:
        """h' `[B, T, d]` of the top level and its state after the call."""
        c = self.config
        position = state["position"].tolist()
        state = {n: t for n, t in state.items() if n.startswith("top.")}
        p = unit(h @ self.top.p.T, c.norm_eps)
        outputs = []
        for start, stop, closing in cut(position, h.shape[1], c.top_period, h.device):
            piece = slice(start, stop)
            f = self.top_close(state, tokens[:, start], adapt, closing)
            outputs.append(h[:, piece] + p[:, piece] @ f)
            rows = self.pending(outputs[-1], p[:, piece], tokens[:, piece], adapt)
            state = {"top.f": f} | {n: torch.cat([state[n], t], 1)[:, -c.top_period :] for n, t in rows.items()}
        return torch.cat(outputs, 1), state

    @staticmethod
    def pending(h: Tensor, p: Tensor, tokens: Tensor, adapt: Tensor) -> TensorDict:
        """What the top level keeps of tokens whose targets it has not learnt from."""
        return {"top.h": h, "top.p": adapt[:, 1:, None] * p, "top.token": tokens.to(h.dtype)}

    @torch.no_grad()
    def next_token(self, h: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss `[B, n]`, its gradient at h `[B, n, d]`, and softmax - onehot `[B, n, V]`, as constants."""
        loss, error = self.softmax_error(h.to(embedding.dtype) @ embedding.T, targets)
        return loss, (error @ embedding).to(h.dtype), error

    def loss(self, tokens: Tensor, targets: Tensor, state: TensorDict) -> tuple[Tensor, TensorDict]:
        """Next-token cross-entropy `[B, T]` in nats, and the next state, at the cost of one softmax.

        With a top level, positions and T must be multiples of `top_period`: then each chunk's gradient at h', which the
        loss needs anyway, is the one that the top level learns from. It counts as a constant, so P,
        eps and lambda are meta-learned to first order.
        """
        c = self.config
        adapt = self.adapt(len(tokens))
        h, new = self.body(tokens, state, adapt)
        new |= {"position": state["position"] + tokens.shape[1]}
        embedding = self.embedding if self.compute is None else self.embedding.to(self.compute)
        if not c.top_rank:
            return rec.CrossEntropy.apply(h, embedding, *self.next_token(h, embedding, targets)), new
        assert tokens.shape[1] % c.top_period == 0, "the loss needs whole chunks of the top level"
        assert not (state["position"] % c.top_period).any(), "the loss starts at a chunk of the top level"
        p = unit(h @ self.top.p.T, c.norm_eps)
        rates = self.top_rates()
        everyone = torch.ones(len(tokens), dtype=torch.bool, device=h.device)
        f = self.top_close(state, tokens[:, 0], adapt, everyone)
        reads, errors, chunks = [], [], range(0, tokens.shape[1], c.top_period)
        for start in chunks:
            piece = slice(start, start + c.top_period)
            keys = p[:, piece]
            reads.append(h[:, piece] + keys @ f)
            errors.append(self.next_token(reads[-1], embedding, targets[:, piece]))
            if start == chunks[-1]:
                new |= {"top.f": f} | self.pending(reads[-1], keys, tokens[:, piece], adapt)
            f = rec.top_step(f, keys.transpose(1, 2) @ errors[-1][1], *rates, adapt, everyone)
        constants = (torch.cat(parts, 1) for parts in zip(*errors, strict=True))
        return rec.CrossEntropy.apply(torch.cat(reads, 1), embedding, *constants), new


def to_tensors(state: MemoryState) -> TensorDict:
    """A NumPy state as the torch state of `Hope`."""
    tensors = {n: torch.from_numpy(t.copy()) for n, t in state.tensors.items()}
    return tensors | {"position": torch.from_numpy(state.position.copy())}


def to_arrays(state: TensorDict) -> MemoryState:
    """The torch state of `Hope` as a NumPy state."""
    arrays = {n: t.detach().cpu().numpy().copy() for n, t in state.items()}
    return MemoryState(arrays, arrays.pop("position"))


def parameters(model: Hope) -> dict[str, np.ndarray]:
    """The parameters of a model as arrays, named as in `reference.step`."""
    return {n: t.detach().cpu().numpy() for n, t in model.state_dict().items()}
