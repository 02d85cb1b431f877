"""More than a few tokens: kept slots, sorted by expert, multiplied in tiles of BM slots.

An expert's last tile is rarely full. Where TAIL slots hold it, it is computed as such a smaller tile: at half the slots
most experts have a part tile, and padding it to BM would eat the saving.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn
from .products_kernel import add_row, dot_down, dot_up, first_of


@triton.jit
def _up_tile(
    x, order, start, count, w, desc, s, b, h, e, n0, d, m, x_row, w_row, w_col, s_row, s_col,
    TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BM)
    live = row < count
    slots = tl.load(order + start + row, mask=live, other=0)
    out = dot_up(
        x + (slots // TOP_K).to(tl.int64) * x_row, live, w, desc, s, b, e, n0, d, m, w_row, w_col, s_row, s_col,
        BM, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT, QN, QK, BULK,
    )  # fmt: skip
    n = n0 + tl.arange(0, BN)
    rows = h + slots.to(tl.int64)[:, None] * m
    tl.store(rows + n[None, :], out.to(h.dtype.element_ty), mask=live[:, None] & (n < m)[None, :])


@triton.jit
def many_up(
    x, order, used, tile_expert, tile_start, tile_rows, w, near, near_w, desc, s, b, h, d, m, x_row, w_expert, w_row,
    w_col, s_expert, s_row, s_col, b_row,
    TOP_K: tl.constexpr, BM: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr, BULK: tl.constexpr, NEAR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [S, m] for the kept slots, in slot order. Grid (tiles of m, tiles of slots)."""
    take_turn(EARLY)
    t = tl.program_id(1)
    if t >= tl.load(used):
        return
    e = tl.load(tile_expert + t)
    n0 = tl.program_id(0) * BN
    start = tl.load(tile_start + t)
    count = tl.load(tile_rows + t)
    w = first_of(e, w, near, near_w, w_expert, True, NEAR)
    s += e.to(tl.int64) * s_expert
    b += e * b_row
    if TAIL < BM:
        if count <= TAIL:
            _up_tile(
                x, order, start, count, w, desc, s, b, h, e, n0, d, m, x_row, w_row, w_col, s_row, s_col,
                TOP_K, TAIL, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT, QN, QK, BULK,
            )  # fmt: skip
            return
    _up_tile(
        x, order, start, count, w, desc, s, b, h, e, n0, d, m, x_row, w_row, w_col, s_row, s_col,
        TOP_K, BM, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT, QN, QK, BULK,
    )  # fmt: skip


@triton.jit
def _down_tile(
    h, gates, order, start, count, w, desc, s, b, parts, e, n0, d, m, w_row, w_col, s_row, s_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr,
    QK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BM)
    live = row < count
    slots = tl.load(order + start + row, mask=live, other=0)
    out = dot_down(
        h + slots.to(tl.int64) * m, live, w, desc, s, b, e, n0, d, m, w_row, w_col, s_row, s_col,
        BM, BN, BK, EVEN, BIAS, QN, QK, BULK,
    )  # fmt: skip
    out *= tl.load(gates + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    n = n0 + tl.arange(0, BN)
    rows = parts + slots.to(tl.int64)[:, None] * d
    tl.store(rows + n[None, :], out.to(parts.dtype.element_ty), mask=live[:, None] & (n < d)[None, :])


@triton.jit
def many_down(
    h, gates, order, used, tile_expert, tile_start, tile_rows, w, near, near_w, desc, s, b, parts, d, m, w_expert, w_row, w_col,
    s_expert, s_row, s_col,
    BM: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    QN: tl.constexpr, QK: tl.constexpr, BULK: tl.constexpr, NEAR: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts [S, d] ← gate · (h W_downᵀ) for the kept slots. Grid (tiles of d, tiles of slots)."""
    take_turn(EARLY)
    t = tl.program_id(1)
    if t >= tl.load(used):
        return
    e = tl.load(tile_expert + t)
    n0 = tl.program_id(0) * BN
    start = tl.load(tile_start + t)
    count = tl.load(tile_rows + t)
    w = first_of(e, w, near, near_w, w_expert, True, NEAR)
    s += e.to(tl.int64) * s_expert
    b += e * d
    if TAIL < BM:
        if count <= TAIL:
            _down_tile(
                h, gates, order, start, count, w, desc, s, b, parts, e, n0, d, m, w_row, w_col, s_row, s_col,
                TAIL, BN, BK, EVEN, BIAS, QN, QK, BULK,
            )  # fmt: skip
            return
    _down_tile(
        h, gates, order, start, count, w, desc, s, b, parts, e, n0, d, m, w_row, w_col, s_row, s_col,
        BM, BN, BK, EVEN, BIAS, QN, QK, BULK,
    )  # fmt: skip


@triton.jit
def many_sum(
    parts, ids, add, y, E, d, TOP_K: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← sum of a token's kept parts, in slot order, fp32; ADD: plus `add` [T, d].

    Grid (T, tiles of d): T may pass 65,535.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    take_turn(EARLY)
    added = tl.load(add + token * d + n, mask=n < d, other=0.0) if ADD else 0.0
    for slot in tl.static_range(TOP_K):
        e = tl.load(ids + token * TOP_K + slot)
        width = tl.where((e >= 0) & (e < E), d, 0)  # nothing was written for a skipped slot
        total += tl.load(parts + (token * TOP_K + slot) * d + n, mask=n < width, other=0.0).to(tl.float32)
    total = add_row(total.to(y.dtype.element_ty), added, ADD)
    tl.store(y + token * d + n, total, mask=n < d)
