"""The literal one-token recurrence in torch: the eager baseline, and a second reading of the law."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl_runtime import recurrence as rec
from fednl_runtime.config import INPUTS, MEMORIES, HopeConfig
from fednl_runtime.hope import Block, Hope
from fednl_runtime.recurrence import TensorDict, unit


def left(x: Tensor, w: Tensor) -> Tensor:
    """x^T W for vectors `[..., K]` and matrices `[..., K, V]`."""
    return (x[..., None, :] @ w)[..., 0, :]


def outer(x: Tensor, y: Tensor) -> Tensor:
    """x y^T for vectors."""
    return x[..., :, None] * y[..., None, :]


def memory_read(x: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
    """M(x) for vectors `[..., h]`."""
    return rec.memory_read(x[..., None, :], w1, w2, eps)[..., 0, :]


def gates(layer: TensorDict, eta_in: Tensor, alpha_in: Tensor, adapt: Tensor, c: HopeConfig) -> tuple[Tensor, Tensor]:
    """Step size eta and retention alpha, both `[B, H]`."""
    eta, log_alpha = rec.gates(layer, eta_in[:, :, None], alpha_in[:, :, None], adapt, c)
    return eta[..., 0], log_alpha[..., 0].exp()


def delta_mixer(
    u: Tensor, layer: TensorDict, state: TensorDict, adapt: Tensor, c: HopeConfig
) -> tuple[Tensor, TensorDict]:
    """Gated delta rule: u `[4, B, H, h]` -> y `[B, H, h]`."""
    k, v, q, g = u
    eta, alpha = gates(layer, g, g, adapt, c)
    s = alpha[..., None, None] * state["s"]
    s = s + eta[..., None, None] * outer(k, v - left(k, s))
    return left(q, s), {"s": s}


def self_modifying_mixer(
    u: Tensor, layer: TensorDict, state: TensorDict, adapt: Tensor, closing: Tensor, c: HopeConfig
) -> tuple[Tensor, TensorDict]:
    """Five self-modifying memories, one token; see `reference.self_modifying_mixer`."""
    u_k, u_v, q, u_g = u
    five, heads = len(MEMORIES), c.n_head
    promote = (closing & (adapt[:, 0] > 0))[:, None, None, None]
    d1_boundary = torch.where(promote, state["w1"], state["w1_boundary"])
    d2_boundary = torch.where(promote, state["w2"], state["w2_boundary"])
    w1, w2 = layer["w1_init"] + d1_boundary, layer["w2_init"] + d2_boundary
    reads = memory_read(torch.cat([u_k, u_v, u_g, u_g], 1), w1[:, : 4 * heads], w2[:, : 4 * heads], c.norm_eps)
    k, v, eta_in, alpha_in = reads.split(heads, 1)
    eta, alpha = (x.repeat(1, five)[..., None, None] for x in gates(layer, eta_in, alpha_in, adapt, c))
    k, v = (unit(x, c.norm_eps).repeat(1, five, 1) for x in (k, v))
    v_hat = memory_read(v, w1, w2, c.norm_eps)
    a_hat, e, d = (x[..., 0, :] for x in rec.inner_gradient(k[..., None, :], v_hat[..., None, :], w1, w2, c))
    d1, d2 = state["w1"], state["w2"]
    d1 = alpha * d1 - eta * outer(a_hat, left(a_hat, layer["w1_init"] + d1) + e)
    d2 = alpha * d2 - eta * outer(k, left(k, layer["w2_init"] + d2) + d)
    running = (layer["w1_init"] + d1)[:, -heads:], (layer["w2_init"] + d2)[:, -heads:]
    return memory_read(q, *running, c.norm_eps), {
        "w1_boundary": d1_boundary, "w2_boundary": d2_boundary, "w1": d1, "w2": d2,
    }  # fmt: skip


def mixer(
    model: Hope, x: Tensor, layer: TensorDict, state: TensorDict, adapt: Tensor, position: Tensor
) -> tuple[Tensor, TensorDict]:
    """Memory mixer of one block over x `[B, d]`."""
    c = model.config
    projected = model.linear(model.rms_norm(x, layer["norm"]), layer["w_in"])
    u, z = projected.split([len(INPUTS) * c.d_model, c.d_model], -1)
    window = torch.cat([state["conv"], u[:, None]], 1)
    u = (window * layer["conv"].T).sum(1).unflatten(-1, (len(INPUTS), c.n_head, c.d_head))
    u = unit(u, c.norm_eps).transpose(0, 1)
    if "s" in state:
        y, new = delta_mixer(u, layer, state, adapt, c)
    else:
        y, new = self_modifying_mixer(u, layer, state, adapt, position % c.memory_period == 0, c)
    y = model.rms_norm(y, layer["head_norm"]).flatten(1) * F.silu(z)
    return model.linear(y, layer["w_out"]), {"conv": window[:, 1:], **new}


def cms(
    model: Hope, x: Tensor, layer: TensorDict, state: TensorDict, adapt: Tensor, position: Tensor
) -> tuple[Tensor, TensorDict]:
    """Continuum Memory System of one block over x `[B, d]`."""
    c = model.config
    levels = []
    for i, period in enumerate(c.cms_periods):
        f, a, g = rec.cms_close(
            state["cms_f"][:, i], state["cms_a"][:, i], state["cms_g"][:, i],
            torch.sigmoid(layer["cms_step"][i]) / period, torch.sigmoid(layer["cms_decay"][i]),
            adapt, position % period == 0,
        )  # fmt: skip
        h = model.linear(model.rms_norm(x, layer["cms_norm"][i]), layer["cms_in"][i])
        up, p, t = h.split([c.d_cms, c.cms_rank, c.d_model], -1)
        p = unit(p, c.norm_eps)
        x = x + model.linear(F.silu(up), layer["cms_out"][i]) + left(p, f)
        weighted = adapt[:, 1:] * p
        levels.append((f, a + outer(weighted, t), g + outer(weighted, p)))
    return x, {
        name: torch.stack(t, 1) for name, t in zip(("cms_f", "cms_a", "cms_g"), zip(*levels, strict=True), strict=True)
    }


def step(model: Hope, tokens: Tensor, state: TensorDict, adapt: Tensor | None = None) -> tuple[Tensor, TensorDict]:
    """One token for each row: tokens `[B]` -> logits `[B, V]` and the next state."""
    c = model.config
    adapt = model.adapt(len(tokens)) if adapt is None else adapt
    position = state["position"]
    x = model.embedding[tokens]
    new: TensorDict = {}
    for i, block in enumerate(model.layers):
        assert isinstance(block, Block)
        layer = block.tensors()
        own = {n.removeprefix(f"{i}."): t for n, t in state.items() if n.startswith(f"{i}.")}
        added, mixed = mixer(model, x, layer, own, adapt, position)
        x = x + added
        if c.n_cms:
            x, levels = cms(model, x, layer, own, adapt, position)
            mixed |= levels
        new |= {f"{i}.{n}": t for n, t in mixed.items()}
    h = model.rms_norm(x, model.norm)
    if c.top_rank:
        read, levels = model.read_top(h[:, None], tokens[:, None], state, adapt)
        h, new = read[:, 0], new | levels
    return h @ model.embedding.T, new | {"position": position + 1}
