"""One token, or very few: a matrix-vector product per slot, whole rows in flight at once.

What a program reads it asks for before it waits for any of it, and its threads add up among themselves once, at the end. An FP8
weight's factor goes to what the weight is multiplied by: the rows of a tile lie inside one block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn
from .products_kernel import add_row, both, by_eight, finish_up, first_of


@triton.jit
def _rows(at, inside, k, d, EVEN: tl.constexpr):
    """Rows [BN, BK] of a matrix, on their way from memory."""
    mask = inside[:, None] if EVEN else inside[:, None] & (k < d)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _scaled(v, factors, row, k, d, s_row, s_col, QN: tl.constexpr, QK: tl.constexpr):
    """v [BK] times the factors of a matrix's columns k, whose rows are in the block of `row`."""
    if QK > 0:
        v *= tl.load(factors + (row // QN) * s_row + (k // QK) * s_col, mask=k < d, other=0.0).to(tl.float32)
    return v


@triton.jit
def one_up(
    x, ids, w, near, near_w, s, b, h, E, d, m, x_row, w_expert, w_row, w_col, s_expert, s_row, s_col, b_row,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, BESIDE: tl.constexpr, NEAR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [S, m] ← act of the up product, slot by slot. Grid (tiles of m, S), or BESIDE (S, tiles of m)."""
    take_turn(EARLY)
    slot = tl.program_id(1 - BESIDE)
    e = tl.load(ids + slot)
    if (e < 0) | (e >= E):
        return
    first = tl.program_id(BESIDE) * BN
    n = first + tl.arange(0, BN)
    inside = n < m
    gate_row, up_row = (n * 2, n * 2 + 1) if INTERLEAVED else (n, n + m)
    gate_first, up_first = (first * 2, first * 2 + 1) if INTERLEAVED else (first, first + m)
    base = first_of(e, w, near, near_w, w_expert, True, NEAR)
    factors = s + e.to(tl.int64) * s_expert
    gate = tl.zeros((BN, BK // 8), tl.float32)
    up = tl.zeros((BN, BK // 8), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        gates = _rows(base + gate_row[:, None] * w_row + k[None, :] * w_col, inside, k, d, EVEN)
        ups = _rows(base + up_row[:, None] * w_row + k[None, :] * w_col, inside, k, d, EVEN) if GATED else gates
        v = tl.load(x + (slot // TOP_K) * x_row + k, mask=k < d, other=0.0).to(tl.float32)
        gate += by_eight(gates.to(tl.float32) * _scaled(v, factors, gate_first, k, d, s_row, s_col, QN, QK)[None, :])
        if GATED:
            up += by_eight(ups.to(tl.float32) * _scaled(v, factors, up_first, k, d, s_row, s_col, QN, QK)[None, :])
    if GATED:
        gate, up = tl.reduce((gate, up), 1, both)
    else:
        gate, up = tl.sum(gate, 1), 0.0
    out = finish_up(gate, up, b + e * b_row, gate_row, up_row, inside, GATED, BIAS, KIND, ALPHA, LIMIT)
    tl.store(h + slot * m + n, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _step(q, e, order, total, KC: tl.constexpr, KSTEPS: tl.constexpr, BK: tl.constexpr):
    """What step q of a token's down product reads: (its KC slots, their experts, which there are, first column)."""
    c = (q // KSTEPS) * KC + tl.arange(0, KC)
    mine = order[None, :] == c[:, None]
    slots = tl.sum(tl.where(mine, tl.arange(0, e.shape[0])[None, :], 0), 1)
    return slots, tl.sum(tl.where(mine, e[None, :], 0), 1), c < total, (q % KSTEPS) * BK


@triton.jit
def _fetch(
    q, e, order, total, n, w, near, near_w, d, m, w_expert, w_row, w_col,
    KC: tl.constexpr, KSTEPS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The weights [KC, BN, BK] of step q, on their way from memory."""
    _, expert, there, start = _step(q, e, order, total, KC, KSTEPS, BK)
    k = start + tl.arange(0, BK)
    mask = there[:, None, None] & (n < d)[None, :, None]
    mask = mask if EVEN else mask & (k < m)[None, None, :]
    base = first_of(expert, w, near, near_w, w_expert, there, NEAR)
    rows = base[:, None, None] + n[None, :, None] * w_row
    return tl.load(rows + k[None, None, :] * w_col, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _given(
    q, e, order, total, first, h, gates, s, m, s_expert, s_row, s_col,
    KC: tl.constexpr, KSTEPS: tl.constexpr, BK: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """What the weights of step q are multiplied by: h [KC, BK], and gates (times factors) [KC]. With factors BK = QK."""
    slots, expert, there, start = _step(q, e, order, total, KC, KSTEPS, BK)
    k = start + tl.arange(0, BK)
    v = tl.load(h + slots[:, None] * m + k[None, :], mask=there[:, None] & (k < m)[None, :], other=0.0)
    gate = tl.load(gates + slots, mask=there, other=0.0).to(tl.float32)
    if QK > 0:
        factors = s + expert.to(tl.int64) * s_expert + (first // QN) * s_row + (start // QK) * s_col
        gate *= tl.load(factors, mask=there, other=0.0).to(tl.float32)
    return v, gate


@triton.jit
def _weigh(tile, v, gate):
    """Weights [KC, BN, BK] times h and gate of their slots, added up over these: [BN, BK / 8] in fp32."""
    return tl.sum(by_eight(tile.to(tl.float32) * v.to(tl.float32)[:, None, :]) * gate[:, None, None], 0)


@triton.jit
def _biases(e, kept, gates, b, n, d):
    """Σ over a token's kept slots of gate · bias: [BN] in fp32."""
    j = tl.arange(0, e.shape[0])
    gate = tl.load(gates + j, mask=kept, other=0.0).to(tl.float32)
    bias = tl.load(b + e[:, None] * d + n[None, :], mask=kept[:, None] & (n < d)[None, :], other=0.0)
    return tl.sum(bias.to(tl.float32) * gate[:, None], 0)


@triton.jit
def one_down(
    h, ids, gates, add, w, near, near_w, s, b, y, E, d, m, w_expert, w_row, w_col, s_expert, s_row, s_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, KC: tl.constexpr, KSTEPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr, AHEAD: tl.constexpr,
    BESIDE: tl.constexpr, NEAR: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, T), or BESIDE (T, tiles of d).

    KC kept slots at a time, so that no thread holds a skipped one, and KSTEPS steps along m for each. With EARLY the
    kernel starts while the up product still runs: it fetches the weights of AHEAD steps, which nobody is writing, and
    only then waits for h. ADD: plus `add` [T, d].
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1 - BESIDE)
    first = tl.program_id(BESIDE) * BN
    n = first + tl.arange(0, BN)
    j = tl.arange(0, KP)
    e = tl.load(ids + t * TOP_K + j, mask=j < TOP_K, other=-1).to(tl.int32)
    kept = (e >= 0) & (e < E)
    order = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0) - 1, -1)
    total = tl.sum(kept.to(tl.int32), 0)
    h += t * TOP_K * m
    gates += t * TOP_K
    tiles = ()
    for q in tl.static_range(AHEAD):
        tiles += (
            _fetch(q, e, order, total, n, w, near, near_w, d, m, w_expert, w_row, w_col, KC, KSTEPS, BK, EVEN, NEAR),
        )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    added = tl.load(add + t * d + n, mask=n < d, other=0.0) if ADD else 0.0
    given = ()
    for q in tl.static_range(AHEAD):
        given += (_given(q, e, order, total, first, h, gates, s, m, s_expert, s_row, s_col, KC, KSTEPS, BK, QN, QK),)
    products = tl.zeros((BN, BK // 8), tl.float32)
    for q in tl.static_range(AHEAD):
        products += _weigh(tiles[q], *given[q])
    for q in range(AHEAD, tl.cdiv(total, KC) * KSTEPS):
        tile = _fetch(q, e, order, total, n, w, near, near_w, d, m, w_expert, w_row, w_col, KC, KSTEPS, BK, EVEN, NEAR)
        v, gate = _given(q, e, order, total, first, h, gates, s, m, s_expert, s_row, s_col, KC, KSTEPS, BK, QN, QK)
        products += _weigh(tile, v, gate)
    out = tl.sum(products, 1)
    if BIAS:
        out += _biases(e, kept, gates, b, n, d)
    out = add_row(out.to(y.dtype.element_ty), added, ADD)
    tl.store(y + t * d + n, out, mask=n < d)
