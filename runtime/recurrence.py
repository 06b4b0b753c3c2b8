"""Chunk forms of the memories in torch: n tokens at once, equal to n steps of the law.

The WY form: within a chunk every write is a rank-one update, so the writes solve one unit lower
triangular system per head (docs and equations: Yang et al., Gated DeltaNet, arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fednl_runtime.config import MEMORIES, HopeConfig

TensorDict = dict[str, Tensor]


def unit(x: Tensor, eps: float) -> Tensor:
    """n(x) = x / sqrt(|x|^2 + eps) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def clip_norm(x: Tensor, limit: float) -> Tensor:
    """x scaled so that its last axis has at most norm `limit`."""
    return x * (limit * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)).clamp(max=1)


def memory_read(x: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
    """M(x) = x + W1 n(s(W2 x)) for rows x `[..., n, h]` and weights `[..., h, m]`, `[..., m, h]`."""
    return x + unit(F.silu(x @ w2), eps) @ w1


def inner_gradient(k: Tensor, v_hat: Tensor, w1: Tensor, w2: Tensor, c: HopeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """(a-hat, e, d) of 1/2 |M(k) - v-hat|^2, rows `[..., n, *]`; see `reference.inner_gradient`."""
    z = k @ w2
    gate = torch.sigmoid(z)
    a = z * gate
    scale = torch.rsqrt(a.square().sum(-1, keepdim=True) + c.norm_eps)
    a_hat = a * scale
    e = clip_norm(k + a_hat @ w1 - v_hat, c.error_clip)
    b = e @ w1.transpose(-1, -2)
    slope = gate * (1 + z * (1 - gate))
    d = slope * (b - a_hat * (a_hat * b).sum(-1, keepdim=True)) * scale
    return a_hat, e, clip_norm(d, c.error_clip)


def decay_matrix(rows: Tensor, columns: Tensor, diagonal: int) -> Tensor:
    """exp(rows_i - columns_j) for j <= i + diagonal, else 0; `[..., n]` each -> `[..., n, n]`.

    The exponent is masked before exp, so that the upper triangle cannot overflow.
    """
    x = rows[..., :, None] - columns[..., None, :]
    keep = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(diagonal)
    return torch.exp(x.masked_fill(~keep, float("-inf")))


def solve_writes(keys: Tensor, eta: Tensor, decay: Tensor, rhs: Tensor) -> Tensor:
    """w of (I + T) w = rhs with T_ij = eta_i decay_ij (k_i . k_j), j < i; rhs `[..., n, V]`."""
    system = eta[..., None] * decay * (keys @ keys.transpose(-1, -2))
    return torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)


def delta(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, log_alpha: Tensor, s: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Gated delta rule, read after write: q, k, v `[B, H, T, h]`, gates `[B, H, T]`, S `[B, H, K, V]`.

    `chunk` sets the speed only, never the result.
    """
    length = q.shape[2]
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    eta, log_alpha = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (eta, log_alpha))
    c = log_alpha.cumsum(-1)
    decay = decay_matrix(c, c, 0)
    keys_read = k * c.exp()[..., None]
    writes = solve_writes(k, eta, decay.tril(-1), eta[..., None] * torch.cat([v, keys_read], -1))
    own, of_state = writes.split([v.shape[-1], k.shape[-1]], -1)
    attention = decay * (q @ k.transpose(-1, -2))
    q_read = q * c.exp()[..., None]
    k_last = k * (c[..., -1:] - c).exp()[..., None]
    outputs = []
    for i in range(q.shape[2]):
        w = own[:, :, i] - of_state[:, :, i] @ s
        outputs.append(q_read[:, :, i] @ s + attention[:, :, i] @ w)
        s = c[:, :, i, -1].exp()[..., None, None] * s + k_last[:, :, i].transpose(-1, -2) @ w
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length], s


def gates(layer: TensorDict, eta_in: Tensor, alpha_in: Tensor, adapt: Tensor, c: HopeConfig) -> tuple[Tensor, Tensor]:
    """Step size eta and log retention `[B, H, T]` from gate vectors `[B, H, T, h]`."""
    root = c.d_head**0.5
    eta = c.eta_max * torch.sigmoid(root * (eta_in @ layer["r_eta"][..., None])[..., 0] + layer["b_eta"][:, None])
    x = root * (alpha_in @ layer["r_alpha"][..., None])[..., 0] + layer["b_alpha"][:, None]
    scale = adapt[:, 0, None, None]
    return scale * eta, scale * F.logsigmoid(x).clamp(min=c.log_alpha_min)


def self_modifying(
    u: tuple[Tensor, ...], layer: TensorDict, state: TensorDict, adapt: Tensor, closing: Tensor, c: HopeConfig
) -> tuple[Tensor, TensorDict]:
    """One piece of at most `memory_period` tokens; u = (u_k, u_v, q, u_g), each `[B, H, n, h]`.

    The five memories run as one batch `[B, 5, H, ...]`; `closing [B]` as in the law.
    """
    u_k, u_v, q, u_g = u
    five = len(MEMORIES)
    promote = (closing & (adapt[:, 0] > 0))[:, None, None, None]
    d1_boundary = torch.where(promote, state["w1"], state["w1_boundary"])
    d2_boundary = torch.where(promote, state["w2"], state["w2_boundary"])
    init1, init2 = (layer[name].unflatten(0, (five, -1)) for name in ("w1_init", "w2_init"))
    w1, w2 = (init + d.unflatten(1, (five, -1)) for init, d in ((init1, d1_boundary), (init2, d2_boundary)))

    read = memory_read(torch.stack([u_k, u_v, u_g, u_g], 1), w1[:, :4], w2[:, :4], c.norm_eps)
    k, v, eta_in, alpha_in = read.unbind(1)
    k, v = unit(k, c.norm_eps), unit(v, c.norm_eps)
    eta, log_alpha = gates(layer, eta_in, alpha_in, adapt, c)
    keys = k[:, None]
    v_hat = memory_read(v[:, None], w1, w2, c.norm_eps)
    a_hat, e, d = inner_gradient(keys, v_hat, w1, w2, c)

    total = log_alpha.cumsum(-1)
    before = total - log_alpha
    decay = decay_matrix(before, total, -1)
    d1, d2 = state["w1"].unflatten(1, (five, -1)), state["w2"].unflatten(1, (five, -1))
    gamma = before.exp()[:, None, ..., None]
    step = eta[:, None, ..., None]
    rhs2 = -step * (d + keys @ init2 + gamma * (keys @ d2))
    rhs1 = -step * (e + a_hat @ init1 + gamma * (a_hat @ d1))
    wide = rhs2.permute(0, 2, 3, 1, 4).flatten(3)
    writes2 = solve_writes(k, eta, decay, wide).unflatten(3, (five, -1)).permute(0, 3, 1, 2, 4)
    writes1 = solve_writes(a_hat, eta[:, None], decay[:, None], rhs1)

    reach = decay_matrix(total, total, 0)
    now = total.exp()[..., None]
    z = q @ (init2[-1]) + now * (q @ d2[:, -1]) + (reach * (q @ k.transpose(-1, -2))) @ writes2[:, -1]
    b = unit(F.silu(z), c.norm_eps)
    y = q + b @ init1[-1] + now * (b @ d1[:, -1]) + (reach * (b @ a_hat[:, -1].transpose(-1, -2))) @ writes1[:, -1]

    last = total[..., -1, None, None].exp()[:, None]
    left = (total[..., -1:] - total).exp()[:, None, ..., None]
    d1 = last * d1 + (left * a_hat).transpose(-1, -2) @ writes1
    d2 = last * d2 + (left * keys).transpose(-1, -2) @ writes2
    return y, {"w1_boundary": d1_boundary, "w2_boundary": d2_boundary, "w1": d1.flatten(1, 2), "w2": d2.flatten(1, 2)}


def cms_close(
    f: Tensor, a: Tensor, g: Tensor, eps: Tensor, decay: Tensor, adapt: Tensor, closing: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One CMS level's step for the rows in `closing [B]`; F, A `[B, r, d]`, G `[B, r, r]`."""
    slow = adapt[:, 1, None, None]
    now = closing[:, None, None] & (slow > 0)
    f = torch.where(now, f + slow * (decay - 1) * f + eps * (a - g @ f), f)
    return f, torch.where(now, 0, a), torch.where(now, 0, g)


def top_step(f: Tensor, pg: Tensor, eps: Tensor, decay: Tensor, cap: Tensor, adapt: Tensor, closing: Tensor) -> Tensor:
    """F of the top level after a step on sum_t p_t g_t^T `[B, r, d]`, its norm at most `cap`."""
    slow = adapt[:, 1, None, None]
    stepped = f + slow * (decay - 1) * f - eps * pg
    stepped = stepped * (cap * torch.rsqrt(stepped.square().sum((1, 2), keepdim=True) + 1e-12)).clamp(max=1)
    return torch.where(closing[:, None, None] & (slow > 0), stepped, f)


def softmax_error(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy `[B, n]` in nats and softmax - onehot, typed as the logits `[B, n, V]`, for targets `[B, n]`."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = x.amax(-1, keepdim=True)
    odds = (x - top).exp()
    total = odds.sum(-1, keepdim=True)
    onehot = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) == targets[..., None].int()
    loss = top + total.log() - x.gather(-1, targets[..., None])
    return loss[..., 0], (odds / total - onehot.to(x.dtype)).to(logits.dtype)


class CrossEntropy(torch.autograd.Function):
    """Losses that `softmax_error` computed, with their gradients at the hidden states and the embedding.

    The gradient g is what the top level learns from and what back-propagation needs, so the exact top level
    costs the training step nothing; the embedding's is one product over all chunks.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, h: Tensor, embedding: Tensor, loss: Tensor, g: Tensor, error: Tensor
    ) -> Tensor:
        """h and g `[B, n, d]`, embedding `[V, d]`, loss `[B, n]`, error `[B, n, V]` -> loss."""
        ctx.save_for_backward(h, g, error)
        return loss.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for h and the embedding."""
        h, g, error = ctx.saved_tensors  # type: ignore[attr-defined]
        weighted = (d_loss[..., None] * h).to(error.dtype)
        d_embedding = error.flatten(0, -2).T @ weighted.flatten(0, -2)
        return d_loss[..., None] * g, d_embedding, None, None, None
