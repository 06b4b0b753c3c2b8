"""The token memories as Triton kernels, for one token or a chunk: drop-ins for `recurrence` that update state in place.

A call reads each memory from the GPU's memory once and writes it once, boundary weights only where they are promoted;
the chunk form reads boundary weights twice. Programs share the work by row and head, by columns of a delta memory and,
in a chunk, by memory, because these do not touch each other. All arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.language import constexpr, tensor

from fednl_runtime.config import MEMORIES, HopeConfig
from fednl_runtime.recurrence import TensorDict, gates, unit

SIDE = 16
"""Smallest side of a block that is multiplied with another."""
COLUMNS = 32
"""Most columns of a delta memory that one program holds."""
OPTIONS = {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": True}
"""How kernels are compiled: with as many registers as a thread can have; left alone, ptxas may stop at 32 and spill."""

Memories: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""W1 and W2 of the five memories: learned at first, at the boundary, running."""

jit: Callable[[Callable[..., Any]], Any] = triton.jit


@jit
def _left(x: tensor, w: tensor) -> tensor:
    """x W for a vector `[K]` or rows `[n, K]`; not in TF32, which is too coarse for a state that lives long."""
    return tl.sum(x[:, None] * w, 0) if len(x.shape) == 1 else tl.dot(x, w, input_precision="ieee")


@jit
def _right(x: tensor, w: tensor) -> tensor:
    """x W^T for a vector `[V]` or rows `[n, V]`."""
    return tl.sum(x[None, :] * w, 1) if len(x.shape) == 1 else tl.dot(x, tl.trans(w), input_precision="ieee")


@jit
def _square(x: tensor) -> tensor:
    """|x|^2 over the last axis, which is kept."""
    return tl.sum(x * x, -1, keep_dims=True)


@jit
def _unit(x: tensor, EPS: constexpr) -> tensor:
    return x * tl.rsqrt(_square(x) + EPS)


@jit
def _clip(x: tensor, LIMIT: constexpr) -> tensor:
    return x * tl.minimum(LIMIT * tl.rsqrt(_square(x) + 1e-12), 1.0)


@jit
def _log_sigmoid(x: tensor) -> tensor:
    """min(x, 0) - log(1 + y) with y = exp(-|x|), the rounding of 1 + y undone: retentions are very close to 1."""
    y = tl.exp(-tl.abs(x))
    near = 1.0 + y
    excess = tl.where(near == 1.0, 1.0, near - 1.0)
    return tl.minimum(x, 0.0) - tl.where(near == 1.0, y, tl.log(near) * y / excess)


@jit
def _read(x: tensor, w1: tensor, w2: tensor, EPS: constexpr) -> tensor:
    """M(x) = x + W1 n(s(W2 x))."""
    z = _left(x, w2)
    return x + _left(_unit(z * tl.sigmoid(z), EPS), w1)


@jit
def _inner_gradient(k: tensor, v_hat: tensor, w1: tensor, w2: tensor, LIMIT: constexpr, EPS: constexpr) -> tensor:
    """(a-hat, e, d) of 1/2 |M(k) - v-hat|^2; see `reference.inner_gradient`."""
    z = _left(k, w2)
    gate = tl.sigmoid(z)
    a = z * gate
    scale = tl.rsqrt(_square(a) + EPS)
    a_hat = a * scale
    e = _clip(k + _left(a_hat, w1) - v_hat, LIMIT)
    b = _right(e, w1)
    d = gate * (1.0 + z * (1.0 - gate)) * (b - a_hat * tl.sum(a_hat * b, -1, keep_dims=True)) * scale
    return a_hat, e, _clip(d, LIMIT)


@jit
def _decay(rows: tensor, columns: tensor, keep: tensor) -> tensor:
    """exp(rows_i - columns_j) where `keep [n, n]` says so, else 0; the exponent is masked, so that none overflows."""
    return tl.exp(tl.where(keep, rows[:, None] - columns[None, :], float("-inf")))


@jit
def _inverse(system: tensor, length: tensor) -> tensor:
    """(I + T)^-1 of the strictly lower triangular T `[n, n]`, row by row: powers of T would cancel badly in fp32."""
    row = tl.arange(0, system.shape[0])
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for i in range(1, length):
        of_row = tl.sum(tl.where(row[:, None] == i, system, 0.0), 0)
        earlier = tl.sum(of_row[:, None] * inverse, 0)
        inverse = tl.where(row[:, None] == i, inverse - earlier[None, :], inverse)
    return inverse


@jit
def _writes(a: tensor, e: tensor, init: tensor, d: tensor, eta: tensor, before: tensor, inverse: tensor) -> tensor:
    """What a chunk adds to D along its keys a: the rank-one updates of all tokens, each knowing those before it."""
    pull = e + _left(a, init) + tl.exp(before)[:, None] * _left(a, d)
    return _left(inverse, -eta[:, None] * pull)


@jit
def _after(d: tensor, keys: tensor, writes: tensor, total: tensor, last: tensor) -> tensor:
    """D at the end of a chunk."""
    left = tl.trans(tl.exp(last - total)[:, None] * keys)
    return tl.exp(last) * d + _left(left, writes)


@jit
def delta_step_kernel(
    q: tensor, k: tensor, v: tensor, eta: tensor, log_alpha: tensor, s: tensor, y: tensor,
    WIDTH: constexpr, W: constexpr, V: constexpr,
) -> None:  # fmt: skip
    """One token of the gated delta rule: `V` columns of the memory of one head of one row."""
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, W), tl.program_id(1) * V + tl.arange(0, V)
    at_row, at_column = head * WIDTH + row, head * WIDTH + column
    at = s + (head * WIDTH + row[:, None]) * WIDTH + column[None, :]
    inside = (row < WIDTH)[:, None] & (column < WIDTH)[None, :]
    key = tl.load(k + at_row, mask=row < WIDTH, other=0.0)
    memory = tl.exp(tl.load(log_alpha + head)) * tl.load(at, mask=inside, other=0.0)
    error = tl.load(v + at_column, mask=column < WIDTH, other=0.0) - _left(key, memory)
    memory += tl.load(eta + head) * key[:, None] * error[None, :]
    query = tl.load(q + at_row, mask=row < WIDTH, other=0.0)
    tl.debug_barrier()  # no thread writes what another has yet to read
    tl.store(at, memory, mask=inside)
    tl.store(y + at_column, _left(query, memory), mask=column < WIDTH)


@jit
def delta_chunk_kernel(
    q: tensor, k: tensor, v: tensor, eta: tensor, log_alpha: tensor, s: tensor, y: tensor, length: tensor,
    WIDTH: constexpr, W: constexpr, V: constexpr, N: constexpr,
) -> None:  # fmt: skip
    """`length` tokens of the gated delta rule, `N` at a time, while the memory stays in registers."""
    head = tl.program_id(0).to(tl.int64)
    row, column, i = tl.arange(0, W), tl.program_id(1) * V + tl.arange(0, V), tl.arange(0, N)
    at = s + (head * WIDTH + row[:, None]) * WIDTH + column[None, :]
    inside = (row < WIDTH)[:, None] & (column < WIDTH)[None, :]
    memory = tl.load(at, mask=inside, other=0.0)
    for start in range(0, length, N):
        token = start + i
        now = token < length
        at_token = (head * length + token[:, None]) * WIDTH
        in_keys, in_values = now[:, None] & (row < WIDTH)[None, :], now[:, None] & (column < WIDTH)[None, :]
        queries = tl.load(q + at_token + row[None, :], mask=in_keys, other=0.0)
        keys = tl.load(k + at_token + row[None, :], mask=in_keys, other=0.0)
        values = tl.load(v + at_token + column[None, :], mask=in_values, other=0.0)
        step = tl.load(eta + head * length + token, mask=now, other=0.0)
        log_decay = tl.load(log_alpha + head * length + token, mask=now, other=0.0)
        total = tl.cumsum(log_decay, 0)
        reach = _decay(total, total, i[:, None] >= i[None, :])
        system = tl.where(i[:, None] > i[None, :], step[:, None] * reach * _right(keys, keys), 0.0)
        error = values - tl.exp(total)[:, None] * _left(keys, memory)
        writes = _left(_inverse(system, tl.minimum(N, length - start)), step[:, None] * error)
        out = tl.exp(total)[:, None] * _left(queries, memory) + _left(reach * _right(queries, keys), writes)
        tl.store(y + at_token + column[None, :], out, mask=in_values)
        memory = _after(memory, keys, writes, total, tl.sum(log_decay, 0))
    tl.debug_barrier()  # no thread writes what another has yet to read
    tl.store(at, memory, mask=inside)


@jit
def _places(WIDTH: constexpr, HIDDEN: constexpr, W: constexpr, M: constexpr) -> tensor:
    """Where the numbers of W1 `[m, h]` and W2 `[h, m]` lie, and which of their blocks' are inside."""
    wide, deep = tl.arange(0, W), tl.arange(0, M)
    at1, at2 = deep[:, None] * WIDTH + wide[None, :], wide[:, None] * HIDDEN + deep[None, :]
    in1 = (deep < HIDDEN)[:, None] & (wide < WIDTH)[None, :]
    return at1, in1, at2, tl.trans(in1)


@jit
def _load(weights: tensor, first: tensor, places: tensor) -> tensor:
    """W1 and W2 of the memory whose numbers begin at `first`."""
    w1, w2 = weights
    at1, in1, at2, in2 = places
    return tl.load(w1 + first + at1, mask=in1, other=0.0), tl.load(w2 + first + at2, mask=in2, other=0.0)


@jit
def _store(weights: tensor, first: tensor, places: tensor, d1: tensor, d2: tensor) -> None:
    """Replace W1 and W2 of the memory whose numbers begin at `first`."""
    w1, w2 = weights
    at1, in1, at2, in2 = places
    tl.store(w1 + first + at1, d1, mask=in1)
    tl.store(w2 + first + at2, d2, mask=in2)


@jit
def _start(promote: tensor, boundary: tensor, running: tensor) -> tensor:
    """Where the boundary weights of this call are."""
    return tl.where(promote, running[0], boundary[0]), tl.where(promote, running[1], boundary[1])


@jit
def _read_at(
    x: tensor, init: tensor, start: tensor, learned: tensor, first: tensor, places: tensor, EPS: constexpr
) -> tensor:
    """M(x) at the boundary weights of a memory whose initial weights begin at `learned`, its own at `first`."""
    i1, i2 = _load(init, learned, places)
    b1, b2 = _load(start, first, places)
    return _read(x, i1 + b1, i2 + b2, EPS)


@jit
def _gate(x: tensor, gate: tensor, head: tensor, WIDTH: constexpr, W: constexpr, ROOT: constexpr) -> tensor:
    """sqrt(h) r . x + b."""
    r, b = gate
    wide = tl.arange(0, W)
    weights = tl.load(r + head * WIDTH + wide, mask=wide < WIDTH, other=0.0)
    return ROOT * tl.sum(x * weights, 0) + tl.load(b + head)


@jit
def self_modifying_step_kernel(
    u: tensor, gates: tensor, init: tensor, boundary: tensor, running: tensor, adapt: tensor, promoted: tensor,
    y: tensor, HEADS: constexpr, BOXES: constexpr, WIDTH: constexpr, HIDDEN: constexpr, W: constexpr, M: constexpr,
    ROOT: constexpr, ETA_MAX: constexpr, LEAST: constexpr, LIMIT: constexpr, EPS: constexpr,
) -> None:  # fmt: skip
    """One token of the five memories of one head of one row; boundary weights come a second time, from the cache."""
    program, SIZE = tl.program_id(0).to(tl.int64), WIDTH * HIDDEN
    row, head = program // HEADS, program % HEADS
    places, wide, own = _places(WIDTH, HIDDEN, W, M), tl.arange(0, W), row * BOXES * HEADS
    promote, scale = tl.load(promoted + row), tl.load(adapt + 2 * row)
    start, at, inside = _start(promote, boundary, running), program * WIDTH + wide, wide < WIDTH
    u_k, u_v = tl.load(u[0] + at, mask=inside, other=0.0), tl.load(u[1] + at, mask=inside, other=0.0)
    q, u_g = tl.load(u[2] + at, mask=inside, other=0.0), tl.load(u[3] + at, mask=inside, other=0.0)

    first = head * SIZE
    k = _unit(_read_at(u_k, init, start, first, own * SIZE + first, places, EPS), EPS)
    first += HEADS * SIZE
    v = _unit(_read_at(u_v, init, start, first, own * SIZE + first, places, EPS), EPS)
    first += HEADS * SIZE
    eta_in = _read_at(u_g, init, start, first, own * SIZE + first, places, EPS)
    first += HEADS * SIZE
    alpha_in = _read_at(u_g, init, start, first, own * SIZE + first, places, EPS)
    eta = scale * ETA_MAX * tl.sigmoid(_gate(eta_in, gates[0], head, WIDTH, W, ROOT))
    log_alpha = _log_sigmoid(_gate(alpha_in, gates[1], head, WIDTH, W, ROOT))
    alpha = tl.exp(scale * tl.maximum(log_alpha, LEAST))

    for box in range(BOXES):
        first = (box * HEADS + head) * SIZE
        i1, i2 = _load(init, first, places)
        b1, b2 = _load(start, own * SIZE + first, places)
        d1, d2 = _load(running, own * SIZE + first, places)
        v_hat = _read(v, i1 + b1, i2 + b2, EPS)
        a_hat, e, d = _inner_gradient(k, v_hat, i1 + b1, i2 + b2, LIMIT, EPS)
        d1 = alpha * d1 - eta * a_hat[:, None] * (_left(a_hat, i1 + d1) + e)[None, :]
        d2 = alpha * d2 - eta * k[:, None] * (_left(k, i2 + d2) + d)[None, :]
        tl.debug_barrier()  # no thread writes what another has yet to read
        if promote:
            _store(boundary, own * SIZE + first, places, b1, b2)
        _store(running, own * SIZE + first, places, d1, d2)
        if box == BOXES - 1:
            tl.store(y + at, _read(q, i1 + d1, i2 + d2, EPS), mask=inside)


@jit
def reads_kernel(
    x: tensor, init: tensor, boundary: tensor, running: tensor, promoted: tensor, out: tensor, length: tensor,
    HEADS: constexpr, BOXES: constexpr, WIDTH: constexpr, HIDDEN: constexpr, W: constexpr, M: constexpr, N: constexpr,
    EPS: constexpr,
) -> None:  # fmt: skip
    """What one of the first four memories answers to at most `N` tokens, at the boundary weights."""
    program, SIZE = tl.program_id(0).to(tl.int64), WIDTH * HIDDEN
    row, memory = program // (4 * HEADS), program % (4 * HEADS)
    start = _start(tl.load(promoted + row), boundary, running)
    i, wide = tl.arange(0, N), tl.arange(0, W)
    at = (program * length + i[:, None]) * WIDTH + wide[None, :]
    inside = (i < length)[:, None] & (wide < WIDTH)[None, :]
    inputs, first = tl.load(x + at, mask=inside, other=0.0), (row * BOXES * HEADS + memory) * SIZE
    read = _read_at(inputs, init, start, memory * SIZE, first, _places(WIDTH, HIDDEN, W, M), EPS)
    tl.store(out + at, read, mask=inside)


@jit
def self_modifying_chunk_kernel(
    k: tensor, v: tensor, q: tensor, eta: tensor, log_alpha: tensor, init: tensor, boundary: tensor, running: tensor,
    promoted: tensor, y: tensor, length: tensor, HEADS: constexpr, BOXES: constexpr, WIDTH: constexpr,
    HIDDEN: constexpr, W: constexpr, M: constexpr, N: constexpr, LIMIT: constexpr, EPS: constexpr,
) -> None:  # fmt: skip
    """At most `N` tokens, all with one boundary, of one memory of one head of one row."""
    program, SIZE = tl.program_id(0).to(tl.int64), WIDTH * HIDDEN
    row, memory = program // (BOXES * HEADS), program % (BOXES * HEADS)
    i, wide, places = tl.arange(0, N), tl.arange(0, W), _places(WIDTH, HIDDEN, W, M)
    tokens = (row * HEADS + memory % HEADS) * length + i
    at, now = tokens[:, None] * WIDTH + wide[None, :], i < length
    inside = now[:, None] & (wide < WIDTH)[None, :]
    keys, values = tl.load(k + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
    step, log_decay = tl.load(eta + tokens, mask=now, other=0.0), tl.load(log_alpha + tokens, mask=now, other=0.0)
    total, last = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
    before = total - log_decay
    system = step[:, None] * _decay(before, total, i[:, None] > i[None, :])

    promote = tl.load(promoted + row)
    i1, i2 = _load(init, memory * SIZE, places)
    b1, b2 = _load(_start(promote, boundary, running), program * SIZE, places)
    d1, d2 = _load(running, program * SIZE, places)
    v_hat = _read(values, i1 + b1, i2 + b2, EPS)
    a_hat, e, d = _inner_gradient(keys, v_hat, i1 + b1, i2 + b2, LIMIT, EPS)
    writes1 = _writes(a_hat, e, i1, d1, step, before, _inverse(system * _right(a_hat, a_hat), length))
    writes2 = _writes(keys, d, i2, d2, step, before, _inverse(system * _right(keys, keys), length))
    if memory // HEADS == BOXES - 1:
        queries, reach = tl.load(q + at, mask=inside, other=0.0), _decay(total, total, i[:, None] >= i[None, :])
        z = _left(queries, i2) + tl.exp(total)[:, None] * _left(queries, d2)
        z += _left(reach * _right(queries, keys), writes2)
        b = _unit(z * tl.sigmoid(z), EPS)
        out = queries + _left(b, i1) + tl.exp(total)[:, None] * _left(b, d1)
        tl.store(y + at, out + _left(reach * _right(b, a_hat), writes1), mask=inside)
    tl.debug_barrier()  # no thread writes what another has yet to read
    if promote:
        _store(boundary, program * SIZE, places, b1, b2)
    d1, d2 = _after(d1, a_hat, writes1, total, last), _after(d2, keys, writes2, total, last)
    _store(running, program * SIZE, places, d1, d2)


def side(length: int) -> int:
    """The side of a block that holds `length` numbers."""
    return max(SIDE, triton.next_power_of_2(length))


def delta(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, log_alpha: Tensor, s: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """`recurrence.delta` in fp32, except that S is updated in place; the tensors are contiguous."""
    batch, heads, length, width = q.shape
    q, k, v, eta, log_alpha = (x.contiguous() for x in (q, k, v, eta, log_alpha))
    y, columns = torch.empty_like(v), min(COLUMNS, side(width))
    grid, shapes = (batch * heads, triton.cdiv(width, columns)), {"WIDTH": width, "W": side(width), "V": columns}
    if length == 1:
        delta_step_kernel[grid](q, k, v, eta, log_alpha, s, y, **shapes, **OPTIONS)
    else:
        block = side(min(length, chunk))
        delta_chunk_kernel[grid](q, k, v, eta, log_alpha, s, y, length, **shapes, N=block, **OPTIONS)
    return y, s


def constants(c: HopeConfig) -> dict[str, Any]:
    """What all kernels of the self-modifying memories are compiled for."""
    sizes = {"HEADS": c.n_head, "BOXES": len(MEMORIES), "WIDTH": c.d_head, "HIDDEN": c.d_memory}
    return sizes | {"W": side(c.d_head), "M": side(c.d_memory), "EPS": c.norm_eps}


def self_modifying(
    u: tuple[Tensor, ...], layer: TensorDict, state: TensorDict, adapt: Tensor, closing: Tensor, c: HopeConfig
) -> tuple[Tensor, TensorDict]:
    """`recurrence.self_modifying` in fp32, except that the state, whose tensors are contiguous, is updated in place."""
    promoted = closing & (adapt[:, 0] > 0)
    init = layer["w1_init"], layer["w2_init"]
    memories = init, (state["w1_boundary"], state["w2_boundary"]), (state["w1"], state["w2"])
    run = _one_token if u[0].shape[2] == 1 else _tokens
    return run(u, layer, memories, adapt, promoted, c), state


def _one_token(
    u: tuple[Tensor, ...], layer: TensorDict, memories: Memories, adapt: Tensor, promoted: Tensor, c: HopeConfig
) -> Tensor:
    """The reads y `[B, H, 1, h]`."""
    y = torch.empty_like(u[0], memory_format=torch.contiguous_format)
    rules = (layer["r_eta"], layer["b_eta"]), (layer["r_alpha"], layer["b_alpha"])
    rates = {"ROOT": c.d_head**0.5, "ETA_MAX": c.eta_max, "LEAST": c.log_alpha_min, "LIMIT": c.error_clip}
    inputs = tuple(x.contiguous() for x in u)
    self_modifying_step_kernel[len(y) * c.n_head,](
        inputs, rules, *memories, adapt.contiguous(), promoted, y, **constants(c), **rates, **OPTIONS
    )
    return y


def _tokens(
    u: tuple[Tensor, ...], layer: TensorDict, memories: Memories, adapt: Tensor, promoted: Tensor, c: HopeConfig
) -> Tensor:
    """The reads y `[B, H, n, h]`."""
    u_k, u_v, q, u_g = u
    batch, heads, length, _ = q.shape
    x = torch.stack([u_k, u_v, u_g, u_g], 1)
    read, compiled = torch.empty_like(x), constants(c) | {"N": side(length)} | OPTIONS
    reads_kernel[batch * 4 * heads,](x, *memories, promoted, read, length, **compiled)
    k, v, eta_in, alpha_in = read.unbind(1)
    k, v = unit(k, c.norm_eps).contiguous(), unit(v, c.norm_eps).contiguous()
    eta, log_alpha = (x.contiguous() for x in gates(layer, eta_in, alpha_in, adapt, c))
    y = torch.empty_like(k)
    self_modifying_chunk_kernel[batch * len(MEMORIES) * heads,](
        k, v, q.contiguous(), eta, log_alpha, *memories, promoted, y, length, **compiled, LIMIT=c.error_clip
    )
    return y
