"""The law: one token of a Hope model, literally, in NumPy.

Every other implementation (torch, ONNX, Triton) is tested against this one. Sources: Nested
Learning, arXiv 2512.24695, section 8 (self-modifying Titans, Eqs. 83-91) and section 7 (CMS).

A level closes a chunk when the first token of the next one arrives, because only then is the last
target of the top level known. Deviations from the paper, all needed for bounded or exportable state:
inputs and hidden activations are unit vectors, e and d are clipped, weights decay toward their learned
initial values, CMS levels learn a local L2 target, and the convolution follows its projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fednl_runtime.config import INPUTS, MEMORIES, HopeConfig
from fednl_runtime.state import Array, MemoryState, Tensors, Tokens

Parameters = Mapping[str, Array]
Mask = npt.NDArray[np.bool_]
ADAPT = np.ones((1, 2), np.float32)
"""Default scales: token memories and slow levels both learn."""


def unit(x: Array, eps: float) -> Array:
    """n(x) = x / sqrt(|x|^2 + eps) over the last axis."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """RMSNorm over the last axis, times `gain`."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * gain


def sigmoid(x: Array) -> Array:
    """Logistic function, without overflow."""
    return 0.5 * (np.tanh(0.5 * x) + 1)


def silu(x: Array) -> Array:
    """s(x) = x * sigmoid(x)."""
    return x * sigmoid(x)


def silu_slope(x: Array) -> Array:
    """s'(x)."""
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def clip_norm(x: Array, limit: float) -> Array:
    """x scaled so that its last axis has at most norm `limit`."""
    return x * np.minimum(1, limit / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-12))


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def left(x: Array, w: Array) -> Array:
    """x^T W for stacked vectors `[..., K]` and matrices `[..., K, V]`."""
    return np.einsum("...k,...kv->...v", x, w)


def outer(x: Array, y: Array) -> Array:
    """x y^T for stacked vectors: `[..., K]`, `[..., V]` -> `[..., K, V]`."""
    return x[..., :, None] * y[..., None, :]


def memory_read(x: Array, w1: Array, w2: Array, eps: float) -> Array:
    """M(x) = x + W1 n(s(W2 x)): Eq. 89 with a normalised hidden layer; x `[..., h]`."""
    return x + left(unit(silu(left(x, w2)), eps), w1)


def inner_gradient(k: Array, v_hat: Array, w1: Array, w2: Array, c: HopeConfig) -> tuple[Array, Array, Array]:
    """(a-hat, e, d) of 1/2 |M(k) - v-hat|^2: the gradient is e a-hat^T for W1 and d k^T for W2."""
    z = left(k, w2)
    a = silu(z)
    scale = np.sqrt(np.sum(a * a, -1, keepdims=True) + c.norm_eps)
    a_hat = a / scale
    e = clip_norm(k + left(a_hat, w1) - v_hat, c.error_clip)
    b = np.einsum("...v,...kv->...k", e, w1)
    d = silu_slope(z) * (b - a_hat * np.sum(a_hat * b, -1, keepdims=True)) / scale
    return a_hat, e, clip_norm(d, c.error_clip)


def gates(layer: Parameters, eta_in: Array, alpha_in: Array, adapt: Array, c: HopeConfig) -> tuple[Array, Array]:
    """Step size eta and log retention, both `[B, H]`, from the gate vectors `[B, H, h]`."""
    root = math.sqrt(c.d_head)
    eta = c.eta_max * sigmoid(root * np.sum(eta_in * layer["r_eta"], -1) + layer["b_eta"])
    x = root * np.sum(alpha_in * layer["r_alpha"], -1) + layer["b_alpha"]
    log_alpha = np.maximum(-np.logaddexp(0, -x), c.log_alpha_min)
    return adapt[:, :1] * eta, adapt[:, :1] * log_alpha


def delta_mixer(u: Array, layer: Parameters, state: Tensors, adapt: Array, c: HopeConfig) -> tuple[Array, Tensors]:
    """Gated delta rule (FedNL Eq. 9 with a gate), read after write. u `[4, B, H, h]` -> y `[B, H, h]`."""
    k, v, q, g = u
    eta, log_alpha = gates(layer, g, g, adapt, c)
    s = np.exp(log_alpha)[..., None, None] * state["s"]
    s = s + eta[..., None, None] * outer(k, v - left(k, s))
    return left(q, s), {"s": s}


def self_modifying_mixer(
    u: Array, layer: Parameters, state: Tensors, adapt: Array, closing: Mask, c: HopeConfig
) -> tuple[Array, Tensors]:
    """Five self-modifying memories (Eqs. 83-91), layer-wise DGD, read after write.

    `closing [B]` marks rows whose boundary weights are promoted from the running ones.
    """
    u_k, u_v, q, u_g = u
    w1_init, w2_init = layer["w1_init"], layer["w2_init"]
    promote = closing & (adapt[:, 0] > 0)
    d1_boundary = np.where(promote[:, None, None, None], state["w1"], state["w1_boundary"])
    d2_boundary = np.where(promote[:, None, None, None], state["w2"], state["w2_boundary"])
    w1 = np.split(w1_init + d1_boundary, len(MEMORIES), 1)
    w2 = np.split(w2_init + d2_boundary, len(MEMORIES), 1)
    k, v, eta_in, alpha_in = (memory_read(x, w1[i], w2[i], c.norm_eps) for i, x in enumerate((u_k, u_v, u_g, u_g)))
    k, v = unit(k, c.norm_eps), unit(v, c.norm_eps)
    eta, log_alpha = (np.tile(x, (1, len(MEMORIES)))[..., None, None] for x in gates(layer, eta_in, alpha_in, adapt, c))

    k5, v5 = np.tile(k, (1, len(MEMORIES), 1)), np.tile(v, (1, len(MEMORIES), 1))
    w1_all, w2_all = np.concatenate(w1, 1), np.concatenate(w2, 1)
    v_hat = memory_read(v5, w1_all, w2_all, c.norm_eps)
    a_hat, e, d = inner_gradient(k5, v_hat, w1_all, w2_all, c)
    d1, d2 = state["w1"], state["w2"]
    d1 = np.exp(log_alpha) * d1 - eta * outer(a_hat, left(a_hat, w1_init + d1) + e)
    d2 = np.exp(log_alpha) * d2 - eta * outer(k5, left(k5, w2_init + d2) + d)
    y = memory_read(q, (w1_init + d1)[:, -c.n_head :], (w2_init + d2)[:, -c.n_head :], c.norm_eps)
    return y, {"w1_boundary": d1_boundary, "w2_boundary": d2_boundary, "w1": d1, "w2": d2}


def mixer(
    x: Array, layer: Parameters, state: Tensors, adapt: Array, closing: Mask, c: HopeConfig
) -> tuple[Array, Tensors]:
    """The memory mixer of one block: x `[B, d]` -> what is added to the residual stream."""
    projected = rms_norm(x, layer["norm"], c.norm_eps) @ layer["w_in"].T
    u, z = np.split(projected, [len(INPUTS) * c.d_model], -1)
    window = np.concatenate([state["conv"], u[:, None]], 1)
    heads = np.einsum("btc,ct->bc", window, layer["conv"]).reshape(-1, len(INPUTS), c.n_head, c.d_head)
    inputs = unit(heads.swapaxes(0, 1), c.norm_eps)
    if "s" in state:
        y, new = delta_mixer(inputs, layer, state, adapt, c)
    else:
        y, new = self_modifying_mixer(inputs, layer, state, adapt, closing, c)
    y = rms_norm(y, layer["head_norm"], c.norm_eps).reshape(len(x), -1) * silu(z)
    return y @ layer["w_out"].T, {"conv": window[:, 1:], **new}


def cms_close(
    layer: Parameters, state: Tensors, adapt: Array, closing: Mask, c: HopeConfig
) -> tuple[Array, Array, Array]:
    """(F, A, G) after the levels marked in `closing [B, k]` took their step; a frozen level pauses.

    F <- lambda F + (eps / C)(A - G F), A = G = 0: the exact gradient of the chunk's local L2 loss.
    """
    f, a, g = state["cms_f"], state["cms_a"], state["cms_g"]
    slow = adapt[:, 1][:, None, None, None]
    eps = (sigmoid(layer["cms_step"]) / np.array(c.cms_periods, f.dtype))[:, None, None]
    decay = sigmoid(layer["cms_decay"])[:, None, None]
    now = closing[:, :, None, None] & (slow > 0)
    stepped = f + slow * (decay - 1) * f + eps * (a - g @ f)
    return np.where(now, stepped, f), np.where(now, 0, a), np.where(now, 0, g)


def cms(
    x: Array, layer: Parameters, state: Tensors, adapt: Array, closing: Mask, c: HopeConfig
) -> tuple[Array, Tensors]:
    """The Continuum Memory System of one block, fastest level first: x `[B, d]` -> x `[B, d]`."""
    f, a, g = cms_close(layer, state, adapt, closing, c)
    a, g = a.copy(), g.copy()
    for level in range(c.n_cms):
        h = rms_norm(x, layer["cms_norm"][level], c.norm_eps) @ layer["cms_in"][level].T
        up, p, t = np.split(h, [c.d_cms, c.d_cms + c.cms_rank], -1)
        p = unit(p, c.norm_eps)
        a[:, level] += adapt[:, 1, None, None] * outer(p, t)
        g[:, level] += adapt[:, 1, None, None] * outer(p, p)
        x = x + silu(up) @ layer["cms_out"][level].T + left(p, f[:, level])
    return x, {"cms_f": f, "cms_a": a, "cms_g": g}


def top_close(params: Parameters, state: Tensors, tokens: Tokens, adapt: Array, closing: Mask, c: HopeConfig) -> Array:
    """F after the pending chunk's exact next-token gradient; `tokens [B]` is the last target.

    F <- lambda F - eps / rms(|E|)^2 * sum_t p_t g_t^T, g = E^T (softmax(E h') - onehot(y)), |F| bounded.
    """
    f, h, p = state["top.f"], state["top.h"], state["top.p"]
    embedding = params["embedding"]
    targets = np.concatenate([state["top.token"][:, 1:].astype(np.int64), tokens[:, None]], 1)
    error = softmax(h @ embedding.T)
    np.put_along_axis(error, targets[..., None], np.take_along_axis(error, targets[..., None], -1) - 1, -1)
    g = error @ embedding
    power = float(np.sum(embedding.astype(np.float64) ** 2)) / len(embedding)
    eps = 2 * sigmoid(params["top.step"]) / power
    slow = adapt[:, 1][:, None, None]
    stepped = f + slow * (sigmoid(params["top.decay"]) - 1) * f - eps * (p.swapaxes(1, 2) @ g)
    norm = np.sqrt(np.sum(stepped**2, (1, 2), keepdims=True) + 1e-12)
    stepped = stepped * np.minimum(1, c.norm_cap / math.sqrt(power) / norm)
    return np.where(closing[:, None, None] & (slow > 0), stepped, f)


def top(
    h: Array, params: Parameters, state: Tensors, tokens: Tokens, adapt: Array, closing: Mask, c: HopeConfig
) -> tuple[Array, Tensors]:
    """The top level: h' = h + F p, p = n(P h), from the normalised final state h `[B, d]`."""
    f = top_close(params, state, tokens, adapt, closing, c)
    p = unit(h @ params["top.p"].T, c.norm_eps)
    h = h + left(p, f)
    new = {"top.h": h, "top.p": adapt[:, 1:] * p, "top.token": tokens.astype(h.dtype)}
    rolled = {name: np.concatenate([state[name][:, 1:], value[:, None]], 1) for name, value in new.items()}
    return h, {"top.f": f, **rolled}


def layer_items(items: Mapping[str, Array], prefix: str) -> Tensors:
    """The entries below `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in items.items() if name.startswith(prefix)}


def step(
    params: Parameters, c: HopeConfig, tokens: Tokens, state: MemoryState, adapt: Array = ADAPT
) -> tuple[Array, MemoryState]:
    """One token for each row: tokens `[B]`, adapt `[B, 2]` -> logits `[B, V]` and the next state.

    `adapt[:, 0]` scales the updates of the token memories, `adapt[:, 1]` those of the slow levels
    (CMS and top); at 0 the fast weights concerned stay bit-identical.
    """
    adapt = np.broadcast_to(adapt, (len(tokens), 2)).astype(params["embedding"].dtype)
    position = state.position
    cms_closing = position[:, None] % np.array(c.cms_periods, np.int64) == 0
    x = params["embedding"][tokens]
    new: Tensors = {}
    for i in range(c.n_layer):
        layer = layer_items(params, f"layers.{i}.")
        own = layer_items(state.tensors, f"{i}.")
        added, mixed = mixer(x, layer, own, adapt, position % c.memory_period == 0, c)
        x = x + added
        if c.n_cms:
            x, levels = cms(x, layer, own, adapt, cms_closing, c)
            mixed |= levels
        new |= {f"{i}.{name}": value for name, value in mixed.items()}
    h = rms_norm(x, params["norm"], c.norm_eps)
    if c.top_rank:
        h, levels = top(h, params, state.tensors, tokens, adapt, position % c.top_period == 0, c)
        new |= levels
    return h @ params["embedding"].T, MemoryState({name: new[name] for name in state.tensors}, position + 1)


def run(
    params: Parameters, c: HopeConfig, tokens: Tokens, state: MemoryState, adapt: Array = ADAPT
) -> tuple[Array, MemoryState]:
    """`step` over tokens `[B, T]`: logits `[B, T, V]` and the last state."""
    logits = []
    for t in range(tokens.shape[1]):
        out, state = step(params, c, tokens[:, t], state, adapt)
        logits.append(out)
    return np.stack(logits, 1), state
