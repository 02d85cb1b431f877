"""One token, or very few: a matrix-vector product per slot, whole rows in flight at once."""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import finish_up


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
    x, ids, w, s, b, h, E, d, m, x_row, w_expert, w_row, w_col, s_expert, s_row, s_col, b_row,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [S, m] ← act of the up product, slot by slot. Grid (tiles of m, S)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    e = tl.load(ids + slot)
    if (e < 0) | (e >= E):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < m
    gate_row = n * 2 if INTERLEAVED else n
    up_row = gate_row + 1 if INTERLEAVED else n + m
    base = w + e.to(tl.int64) * w_expert
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
def _columns(rows, start, there, m, w_col, BK: tl.constexpr, EVEN: tl.constexpr):
    """Weights [KP, BN, BK] of columns start …, on their way from memory."""
    k = start + tl.arange(0, BK)
    mask = there if EVEN else there & (k < m)[None, None, :]
    return tl.load(rows + k[None, None, :] * w_col, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _weigh(tile, h_rows, factors, start, kept, inside, m, s_col, BK: tl.constexpr, QK: tl.constexpr):
    """tile [KP, BN, BK] times the slots' h: [KP, BN] in fp32. With factors BK = QK: one for the tile's rows."""
    k = start + tl.arange(0, BK)
    v = tl.load(h_rows[:, None] + k[None, :], mask=kept[:, None] & (k < m)[None, :], other=0.0)
    added = tl.sum(tile.to(tl.float32) * v.to(tl.float32)[:, None, :], 2)
    if QK > 0:
        added *= tl.load(factors + (start // QK) * s_col, mask=inside, other=0.0).to(tl.float32)
    return added


@triton.jit
def one_down(
    h, ids, gates, w, s, b, y, E, d, m, w_expert, w_row, w_col, s_expert, s_row, s_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, T).

    All slots are one tile [KP, BN, BK]. With EARLY the kernel starts while the up product still runs: it fetches AHEAD
    tiles of its weights, which nobody is writing, and only then waits for h.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, KP)
    e = tl.load(ids + t * TOP_K + j, mask=j < TOP_K, other=-1)
    kept = (e >= 0) & (e < E)
    inside = kept[:, None] & (n < d)[None, :]
    expert = tl.where(kept, e, 0).to(tl.int64)
    rows = w + expert[:, None, None] * w_expert + n[None, :, None] * w_row
    there = inside[:, :, None]
    h_rows = h + (t * TOP_K + j) * m
    factors = s + expert[:, None] * s_expert + (n // QN)[None, :] * s_row
    first = _columns(rows, 0, there, m, w_col, BK, EVEN)
    if AHEAD > 1:
        second = _columns(rows, BK, there, m, w_col, BK, EVEN)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    part = _weigh(first, h_rows, factors, 0, kept, inside, m, s_col, BK, QK)
    if AHEAD > 1:
        part += _weigh(second, h_rows, factors, BK, kept, inside, m, s_col, BK, QK)
    for start in range(AHEAD * BK, m, BK):
        tile = _columns(rows, start, there, m, w_col, BK, EVEN)
        part += _weigh(tile, h_rows, factors, start, kept, inside, m, s_col, BK, QK)
    if BIAS:
        bias = b + tl.where(kept, e, 0)[:, None] * d + n[None, :]
        part += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + t * TOP_K + j, mask=kept, other=0.0).to(tl.float32)
    tl.store(y + t * d + n, tl.sum(part * gate[:, None], 0).to(y.dtype.element_ty), mask=n < d)
