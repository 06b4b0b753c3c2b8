"""Self-modifying memories without the extra term of Delta Gradient Descent: plain gradient descent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl_runtime import recurrence as rec
from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict, unit


def descend(
    u: tuple[Tensor, ...], layer: TensorDict, state: TensorDict, adapt: Tensor, closing: Tensor, c: HopeConfig
) -> tuple[Tensor, TensorDict]:
    """As `recurrence.self_modifying`, with D <- alpha D - eta gradient: no write depends on another."""
    u_k, u_v, q, u_g = u
    promote = (closing & (adapt[:, 0] > 0))[:, None, None, None]
    boundary = {n: torch.where(promote, state[n], state[f"{n}_boundary"]) for n in ("w1", "w2")}
    init1, init2 = (layer[name].unflatten(0, (len(MEMORIES), -1)) for name in ("w1_init", "w2_init"))
    d1, d2 = (state[n].unflatten(1, (len(MEMORIES), -1)) for n in ("w1", "w2"))
    w1, w2 = (init + boundary[n].unflatten(1, (len(MEMORIES), -1)) for init, n in ((init1, "w1"), (init2, "w2")))
    k, v, eta_in, alpha_in = rec.memory_read(
        torch.stack([u_k, u_v, u_g, u_g], 1), w1[:, :4], w2[:, :4], c.norm_eps
    ).unbind(1)
    k, v = unit(k, c.norm_eps), unit(v, c.norm_eps)
    eta, log_alpha = rec.gates(layer, eta_in, alpha_in, adapt, c)
    keys = k[:, None]
    a_hat, e, d = rec.inner_gradient(keys, rec.memory_read(v[:, None], w1, w2, c.norm_eps), w1, w2, c)
    writes1, writes2 = (-eta[:, None, ..., None] * x for x in (e, d))

    total = log_alpha.cumsum(-1)
    reach, now = rec.decay_matrix(total, total, 0), total.exp()[..., None]
    z = q @ init2[-1] + now * (q @ d2[:, -1]) + (reach * (q @ k.transpose(-1, -2))) @ writes2[:, -1]
    b = unit(F.silu(z), c.norm_eps)
    y = q + b @ init1[-1] + now * (b @ d1[:, -1]) + (reach * (b @ a_hat[:, -1].transpose(-1, -2))) @ writes1[:, -1]
    last = total[..., -1, None, None].exp()[:, None]
    left = (total[..., -1:] - total).exp()[:, None, ..., None]
    d1 = last * d1 + (left * a_hat).transpose(-1, -2) @ writes1
    d2 = last * d2 + (left * keys).transpose(-1, -2) @ writes2
    new = {"w1": d1.flatten(1, 2), "w2": d2.flatten(1, 2)}
    return y, new | {f"{n}_boundary": t for n, t in boundary.items()}


class Descent(Hope):
    """Hope with such memories."""

    def __init__(self, config: HopeConfig, compute: torch.dtype | None = None) -> None:
        super().__init__(config, compute)
        self.self_modifying = descend
