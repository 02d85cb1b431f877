"""One token, or very few: a matrix-vector product per slot, whole rows in flight at once."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn
from .products_kernel import add_row, finish_up, first_of, stand_ins


@triton.jit
def _row_dot(
    rows, x, k, d, inside, factors, s_col, EVEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, QK: tl.constexpr
):
    """Rows [BN] of a matrix times x [BK]: [BN] in fp32. `factors` points at the rows' first block in this tile."""
    mask = inside[:, None] if EVEN else inside[:, None] & (k < d)[None, :]
    w = tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
    products = w.to(tl.float32) * x[None, :]
    if QK > 0:
        blocks = tl.arange(0, BK // QK)
        within = inside[:, None] & (tl.min(k, 0) + blocks * QK < d)[None, :]
        factor = tl.load(factors[:, None] + blocks[None, :] * s_col, mask=within, other=0.0).to(tl.float32)
        return tl.sum(tl.sum(tl.reshape(products, (BN, BK // QK, QK)), 2) * factor, 1)
    else:
        return tl.sum(products, 1)


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
    n = tl.program_id(BESIDE) * BN + tl.arange(0, BN)
    inside = n < m
    gate_row = n * 2 if INTERLEAVED else n
    up_row = gate_row + 1 if INTERLEAVED else n + m
    base = first_of(e, w, near, near_w, w_expert, True, NEAR)
    factors = s + e.to(tl.int64) * s_expert
    q = QN if QK > 0 else 1
    gate = tl.zeros((BN,), tl.float32)
    up = tl.zeros((BN,), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        at = factors + (start // (QK if QK > 0 else 1)) * s_col
        v = tl.load(x + (slot // TOP_K) * x_row + k, mask=k < d, other=0.0).to(tl.float32)
        gates = base + gate_row[:, None] * w_row + k[None, :] * w_col
        gate += _row_dot(gates, v, k, d, inside, at + (gate_row // q) * s_row, s_col, EVEN, BN, BK, QK)
        if GATED:
            ups = base + up_row[:, None] * w_row + k[None, :] * w_col
            up += _row_dot(ups, v, k, d, inside, at + (up_row // q) * s_row, s_col, EVEN, BN, BK, QK)
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
def _weigh(
    tile, q, e, order, total, n, h, gates, s, b, d, m, s_expert, s_row, s_col,
    KC: tl.constexpr, KSTEPS: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """Σ over the step's slots of gate · (tile h): [BN] in fp32. With factors BK = QK: one for the tile's rows."""
    slots, expert, there, start = _step(q, e, order, total, KC, KSTEPS, BK)
    k = start + tl.arange(0, BK)
    v = tl.load(h + slots[:, None] * m + k[None, :], mask=there[:, None] & (k < m)[None, :], other=0.0)
    part = tl.sum(tile.to(tl.float32) * v.to(tl.float32)[:, None, :], 2)
    inside = there[:, None] & (n < d)[None, :]
    if QK > 0:
        factors = s + expert.to(tl.int64)[:, None] * s_expert + (n // QN)[None, :] * s_row + (start // QK) * s_col
        part *= tl.load(factors, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        part += tl.load(b + expert[:, None] * d + n[None, :], mask=inside & (start == 0), other=0.0).to(tl.float32)
    gate = tl.load(gates + slots, mask=there, other=0.0).to(tl.float32)
    return tl.sum(part * gate[:, None], 0)


@triton.jit
def one_down(
    h, ids, gates, mean, add, w, near, near_w, s, b, y, E, d, m, w_expert, w_row, w_col, s_expert, s_row, s_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, KC: tl.constexpr, KSTEPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr, AHEAD: tl.constexpr,
    BESIDE: tl.constexpr, NEAR: tl.constexpr, MEAN: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, T), or BESIDE (T, tiles of d).

    KC kept slots at a time, so that no thread holds a skipped one, and KSTEPS steps along m for each. With EARLY the
    kernel starts while the up product still runs: it fetches the weights of AHEAD steps, which nobody is writing, and
    only then waits for h. MEAN: a slot coded −2 − e adds gate · mean[e]. ADD: plus `add` [T, d].
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1 - BESIDE)
    n = tl.program_id(BESIDE) * BN + tl.arange(0, BN)
    j = tl.arange(0, KP)
    e = tl.load(ids + t * TOP_K + j, mask=j < TOP_K, other=-1).to(tl.int32)
    kept = (e >= 0) & (e < E)
    order = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0) - 1, -1)
    total = tl.sum(kept.to(tl.int32), 0)
    h += t * TOP_K * m
    gates += t * TOP_K
    out = tl.zeros((BN,), tl.float32)
    if MEAN:
        means = stand_ins(ids + t * TOP_K, gates, mean, n, d, TOP_K, KP)
    tiles = ()
    for q in tl.static_range(AHEAD):
        tiles += (
            _fetch(q, e, order, total, n, w, near, near_w, d, m, w_expert, w_row, w_col, KC, KSTEPS, BK, EVEN, NEAR),
        )
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for q in tl.static_range(AHEAD):
        out += _weigh(
            tiles[q], q, e, order, total, n, h, gates, s, b, d, m, s_expert, s_row, s_col, KC, KSTEPS, BK, BIAS, QN, QK
        )
    for q in range(AHEAD, tl.cdiv(total, KC) * KSTEPS):
        tile = _fetch(q, e, order, total, n, w, near, near_w, d, m, w_expert, w_row, w_col, KC, KSTEPS, BK, EVEN, NEAR)
        out += _weigh(
            tile, q, e, order, total, n, h, gates, s, b, d, m, s_expert, s_row, s_col, KC, KSTEPS, BK, BIAS, QN, QK
        )
    if MEAN:
        out += tl.sum(means, 0)
    out = add_row(out.to(y.dtype.element_ty), add + t * d + n, n < d, ADD)
    tl.store(y + t * d + n, out, mask=n < d)
