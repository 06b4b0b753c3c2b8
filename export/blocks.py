"""The blocks of a Hope model as graph nodes: mixers, CMS levels and the top level of `reference.step`."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import TensorProto

from fednl_runtime.config import INPUTS, MEMORIES, HopeConfig
from fednl_runtime.export.ops import NEVER, Ops


@dataclasses.dataclass(frozen=True)
class Call:
    """Values that all layers of one call share, by graph name."""

    token: str
    """Scale of the token memories' updates, `[B, 1, 1]`."""
    eta_scale: str
    """The same times eta_max."""
    minus_token: str
    slow: str
    """Scale of the slow levels' updates, `[B, 1, 1]`."""
    cms_decay: str
    """Log retention of the CMS statistics `[B, T, k]`: 0, or so low that a new chunk starts from 0."""


def prepare(ops: Ops, c: HopeConfig) -> Call:
    """Scales and chunk starts from the inputs `adapt [B, 2]`, `position [B]` and `input_ids [B, T]`."""
    token, slow = ops.split(ops("Unsqueeze", "adapt", ops.ints(1)), (1, 1))
    eta_scale = token if c.eta_max == 1 else ops("Mul", token, ops.const(c.eta_max))
    decay = ""
    if c.n_cms:
        length = ops("Squeeze", ops("Shape", "input_ids", start=1, end=2), ops.ints(0))
        steps = ops("Range", ops.const(0, np.int64), length, ops.const(1, np.int64))
        at = ops("Add", ops("Unsqueeze", "position", ops.ints(1, 2)), ops("Unsqueeze", steps, ops.ints(1)))
        starts = ops("Equal", ops("Mod", at, ops.ints(*c.cms_periods)), ops.ints(0))
        starts = ops("And", starts, ops("Greater", slow, ops.const(0)))
        decay = ops("Where", starts, ops.const(NEVER), ops.const(0))
    return Call(token, eta_scale, ops("Neg", token), slow, decay)


def gate_logit(ops: Ops, c: HopeConfig, x: str, layer: int, name: str) -> str:
    """sqrt(h) (r . x) + b per head: x `[B, T, H, h]` -> `[B, T, H]`."""
    dot = ops("ReduceSum", ops("Mul", x, f"rule.{layer}.r_{name}"), ops.ints(-1), keepdims=0)
    return ops("Add", ops("Mul", dot, ops.const(c.d_head**0.5)), f"rule.{layer}.b_{name}")


def gates(ops: Ops, c: HopeConfig, call: Call, layer: int, eta_in: str, alpha_in: str) -> tuple[str, str]:
    """Step size eta and log retention `[B, T, H]` from the gate vectors `[B, T, H, h]`."""
    eta = ops("Mul", ops("Sigmoid", gate_logit(ops, c, eta_in, layer, "eta")), call.eta_scale)
    loss = ops("Softplus", ops("Neg", gate_logit(ops, c, alpha_in, layer, "alpha")))
    return eta, ops("Mul", ops("Min", loss, ops.const(-c.log_alpha_min)), call.minus_token)


def projections(ops: Ops, c: HopeConfig, layer: int, x: str) -> tuple[str, str]:
    """Unit inputs `[B, T, 4H, h]` in the order of INPUTS, and the output gate `[B, T, d]`."""
    heads, h = len(INPUTS) * c.n_head, c.d_head
    u, z = ops.split(ops.linear(x, f"layers.{layer}.w_in"), (heads * h, c.d_model))
    u = ops.conv(u, f"rule.{layer}.conv", f"{layer}.conv", c.d_conv)
    return ops.unit(ops.reshape(u, 0, 0, heads, h), h, c.norm_eps), z


def delta_mixer(ops: Ops, c: HopeConfig, call: Call, layer: int, x: str) -> tuple[str, str]:
    """Gated delta rule, read after write: normed x `[B, T, d]` -> y `[B, T, H, h]`, output gate z."""
    u, z = projections(ops, c, layer, x)
    kvq, g = ops.split(u, (3 * c.n_head, c.n_head), 2)
    k, v, q = ops.split(ops.reshape(kvq, 0, 0, 3 * c.d_model), (c.d_model,) * 3)
    eta, log_alpha = gates(ops, c, call, layer, g, g)
    y = ops.recurrence(q, k, v, (log_alpha, eta), f"{layer}.s", (c.n_head, c.d_head, c.d_head))
    return ops.reshape(y, 0, 0, c.n_head, c.d_head), z


def memory_read(ops: Ops, c: HopeConfig, x: str, w1: str, w2: str) -> tuple[str, str, str]:
    """(z, a-hat, M(x)) of the residual memories: x `[..., n, h]` with weights `[..., h, m]`, `[..., m, h]`."""
    z = ops("MatMul", x, w2)
    a_hat = ops.unit(ops.silu(z), c.d_memory, c.norm_eps)
    return z, a_hat, ops("Add", x, ops("MatMul", a_hat, w1))


def inner_gradient(ops: Ops, c: HopeConfig, kv: str, w1: str, w2: str) -> tuple[str, str, str]:
    """(a-hat, e, d) of the inner loss for pairs of k and v `[B, T, 1, H, 2, h]`: each `[B, T, 5, H, 1, .]`."""
    z, a_hat, read = memory_read(ops, c, kv, w1, w2)
    read_k, read_v = ops.split(read, (1, 1), 4)
    e = ops.clip_norm(ops("Sub", read_k, read_v), c.error_clip)
    z, a_hat = (ops("Gather", x, ops.ints(0), axis=4) for x in (z, a_hat))
    s = ops("Sigmoid", z)
    a = ops("Mul", z, s)
    slope = ops("Add", a, ops("Mul", s, ops("Sub", ops.const(1), a)))
    norm = ops("Sqrt", ops("Add", ops("ReduceSumSquare", a, ops.ints(-1)), ops.const(c.norm_eps)))
    b = ops.product(e, w1, 6, trans_y=True)
    along = ops("Mul", a_hat, ops("ReduceSum", ops("Mul", a_hat, b), ops.ints(-1)))
    d = ops("Mul", ops("Div", slope, norm), ops("Sub", b, along))
    return a_hat, e, ops.clip_norm(d, c.error_clip)


def self_modifying_mixer(ops: Ops, c: HopeConfig, call: Call, layer: int, x: str) -> tuple[str, str]:
    """Five self-modifying memories (Eqs. 83-91): normed x `[B, T, d]` -> y `[B, T, H, h]`, output gate z."""
    n, heads, h = len(MEMORIES), c.n_head, c.d_head
    u, z = projections(ops, c, layer, x)
    w1, w2 = (boundary_weights(ops, c, layer, name) for name in ("w1", "w2"))
    sources = [INPUTS.index(name) for name in ("k", "v", "g", "g", "q")]  # the last read is not used
    five = ops("Gather", u, ops.ints(*(p * heads + i for p in sources for i in range(heads))), axis=2)
    read = memory_read(ops, c, ops.reshape(five, 0, 0, n, heads, 1, h), w1, w2)[2]
    sizes = (2 * heads, heads, heads, heads)
    kv, eta_in, alpha_in, _ = ops.split(ops.reshape(read, 0, 0, n * heads, h), sizes, 2)
    kv = ops.unit(kv, h, c.norm_eps)
    eta, log_alpha = gates(ops, c, call, layer, eta_in, alpha_in)
    pairs = ops("Transpose", ops.reshape(kv, 0, 0, 2, heads, h), perm=[0, 1, 3, 2, 4])
    gradient = inner_gradient(ops, c, ops.reshape(pairs, 0, 0, 1, heads, 2, h), w1, w2)
    k = ops("Gather", kv, ops.ints(*range(heads)), axis=2)
    first = INPUTS.index("q") * heads
    q = ops("Gather", u, ops.ints(*range(first, first + heads)), axis=2)
    return write_and_read(ops, c, layer, k, q, gradient, eta, log_alpha), z


def write_and_read(
    ops: Ops, c: HopeConfig, layer: int, k: str, q: str, gradient: tuple[str, str, str], eta: str, log_alpha: str
) -> str:
    """Delta gradient descent on the running weights, then the last memory's read: k, q `[B, T, H, h]` -> y.

    W <- alpha W - eta (W k + d) k^T on D = W - W0 is a gated delta rule with beta = eta / alpha and
    v = -alpha (d + W0 k), so that all five memories are heads of one recurrence for each matrix. All are
    read by the last one's query, which costs less than to pick it out.
    """
    heads, h, m = c.n_head, c.d_head, c.d_memory
    a_hat, e, d = gradient
    w1, w2 = (f"layers.{layer}.{name}_init" for name in ("w1", "w2"))
    alpha = ops("Exp", log_alpha)
    minus = ops.reshape(ops("Neg", alpha), 0, 0, 1, heads, 1, 1)
    rates = (all_memories(ops, log_alpha), all_memories(ops, ops("Div", eta, alpha)))
    flat_k, flat_q = (all_memories(ops, ops.reshape(x, 0, 0, c.d_model)) for x in (k, q))

    start = ops("MatMul", ops.reshape(k, 0, 0, 1, heads, 1, h), f"{w2}:heads")
    value = ops("Mul", minus, ops("Add", d, start))
    read = update(ops, c, f"{layer}.w2", (flat_q, flat_k, value), rates, (h, m))
    q = ops.reshape(q, 0, 0, heads, 1, h)
    hidden = ops.unit(ops.silu(ops("Add", read, ops("MatMul", q, f"{w2}:mem"))), m, c.norm_eps)

    value = ops("Mul", minus, ops("Add", e, ops("MatMul", a_hat, f"{w1}:heads")))
    query = all_memories(ops, ops.reshape(hidden, 0, 0, heads * m))
    key = ops.reshape(a_hat, 0, 0, len(MEMORIES) * heads * m)
    read = update(ops, c, f"{layer}.w1", (query, key, value), rates, (m, h))
    return ops.reshape(ops("Add", ops("Add", q, read), ops("MatMul", hidden, f"{w1}:mem")), 0, 0, heads, h)


def all_memories(ops: Ops, x: str) -> str:
    """x `[B, T, n]` once for each memory: `[B, T, 5n]`."""
    return ops("Tile", x, ops.ints(1, 1, len(MEMORIES)))


def update(
    ops: Ops, c: HopeConfig, state: str, qkv: tuple[str, str, str], rates: tuple[str, str], size: tuple[int, int]
) -> str:
    """Write one matrix of all memories; the last memory's read `[B, T, H, 1, V]`."""
    n = len(MEMORIES)
    q, k, v = qkv
    v = ops.reshape(v, 0, 0, n * c.n_head * size[1])
    read = ops.recurrence(q, k, v, rates, state, (n * c.n_head, *size))
    return ops("Gather", ops.reshape(read, 0, 0, n, c.n_head, 1, size[1]), ops.const(n - 1, np.int64), axis=2)


def boundary_weights(ops: Ops, c: HopeConfig, layer: int, name: str) -> str:
    """Weights at the start of the chunk `[B, 1, 5, H, K, V]`."""
    rows, columns = (c.d_memory, c.d_head) if name == "w1" else (c.d_head, c.d_memory)
    total = ops("Add", f"layers.{layer}.{name}_init:f32", f"present.{layer}.{name}_boundary")
    return ops.reshape(total, 0, 1, len(MEMORIES), c.n_head, rows, columns)


def mixer(ops: Ops, c: HopeConfig, call: Call, layer: int, x: str) -> str:
    """The memory mixer of one block: normed x `[B, T, d]` -> what is added to the residual stream."""
    kind = delta_mixer if c.layers[layer] == "delta" else self_modifying_mixer
    y, z = kind(ops, c, call, layer, x)
    y = ops.reshape(ops.rms(y, f"layers.{layer}.head_norm:f32", c.norm_eps), 0, 0, c.d_model)
    return ops.linear(ops("Mul", ops.silu(z), y), f"layers.{layer}.w_out")


def cms(ops: Ops, c: HopeConfig, call: Call, layer: int, x: str, added: str) -> tuple[str, str]:
    """The CMS levels of one block: the stream and what is to be added to it, before and after.

    A <- A + p t^T and G <- G + p p^T are recurrences without beta, one head a level.
    """
    inputs, targets = [], []
    for level in range(c.n_cms):
        normed, x = ops.add_rms(x, added, f"layers.{layer}.cms_norm.{level}:f32", c.norm_eps)
        h = ops.linear(normed, f"layers.{layer}.cms_in.{level}")
        up, p, t = ops.split(h, (c.d_cms, c.cms_rank, c.d_model))
        p = ops.unit(p, c.cms_rank, c.norm_eps)
        fast = ops("MatMul", p, level_of(ops, c, f"present.{layer}.cms_f", level))
        added = ops("Add", ops.linear(ops.silu(up), f"layers.{layer}.cms_out.{level}"), fast)
        inputs.append(p)
        targets.append(t)
    p, t = (ops("Concat", *parts, axis=2) if c.n_cms > 1 else parts[0] for parts in (inputs, targets))
    scaled = ops("Mul", p, call.slow)
    for name, value, width in (("cms_a", t, c.d_model), ("cms_g", p, c.cms_rank)):
        ops.recurrence(scaled, scaled, value, (call.cms_decay,), f"{layer}.{name}", (c.n_cms, c.cms_rank, width))
    return x, added


def level_of(ops: Ops, c: HopeConfig, f: str, level: int) -> str:
    """F `[B, r, d]` of one level out of `[B, k, r, d]`, which is no copy where there is but one."""
    if c.n_cms == 1:
        return ops.reshape(f, 0, c.cms_rank, c.d_model)
    return ops("Gather", f, ops.const(level, np.int64), axis=1)


def top(ops: Ops, c: HopeConfig, call: Call, h: str) -> str:
    """The top level h' = h + F p, p = n(P h), and its pending chunk of (h', p, token)."""
    p = ops.unit(ops.product(h, "rule.top.p", 2, trans_y=True), c.top_rank, c.norm_eps)
    h = ops("Add", h, ops("MatMul", p, "present.top.f"))
    token = ops("Cast", "input_ids", to=TensorProto.FLOAT)
    for name, value in (("h", h), ("p", ops("Mul", p, call.slow)), ("token", token)):
        pending = ops("Concat", f"past.top.{name}", value, axis=1)
        ops.tail(pending, c.top_period, 1, f"present.top.{name}")
    return h
