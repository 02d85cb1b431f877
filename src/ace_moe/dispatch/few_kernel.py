"""Few tokens: one program per (slot, tile of columns).

The first slot of an expert takes along every other slot of it, so each needed expert is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import dot_down, dot_up


@triton.jit
def _members(ids, slot, e, S, SP: tl.constexpr, BM: tl.constexpr):
    """(whether this slot is its expert's first, the expert's slots [BM], how many there are)."""
    lanes = tl.arange(0, SP)
    same = tl.load(ids + lanes, mask=lanes < S, other=-1) == e
    first = tl.min(tl.where(same, lanes, SP), 0)
    order = tl.cumsum(same.to(tl.int32), 0) - 1
    rows = tl.arange(0, BM)
    slots = tl.sum(tl.where(same[None, :] & (order[None, :] == rows[:, None]), lanes[None, :], 0), 1)
    return first == slot, slots, tl.sum(same.to(tl.int32), 0)


@triton.jit
def few_up(
    x, ids, w, s, b, h, S, E, d, m, x_row, w_expert, w_row, w_col, s_expert, s_row, s_col, b_row,
    TOP_K: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h [S, m] ← act of the up product, for the kept slots. Grid (tiles of m, S)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    e = tl.load(ids + slot)
    if (e < 0) | (e >= E):
        return
    leads, slots, count = _members(ids, slot, e, S, SP, BM)
    if not leads:
        return
    live = tl.arange(0, BM) < count
    n0 = tl.program_id(0) * BN
    out = dot_up(
        x + (slots // TOP_K) * x_row, live, w + e.to(tl.int64) * w_expert, w, s + e.to(tl.int64) * s_expert,
        b + e * b_row, e, n0, d, m, w_row, w_col, s_row, s_col,
        BM, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT, QN, QK, False,
    )  # fmt: skip
    n = n0 + tl.arange(0, BN)
    tl.store(h + slots[:, None] * m + n[None, :], out.to(h.dtype.element_ty), mask=live[:, None] & (n < m)[None, :])


@triton.jit
def few_down(
    h, ids, gates, w, s, b, partial, arrived, y, S, E, d, m, w_expert, w_row, w_col, s_expert, s_row, s_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, QN: tl.constexpr, QK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, S).

    Each program leaves its slots' parts in `partial` [S, d]; the last one to arrive at a token adds the parts in slot
    order, so the sum does not depend on the order of arrival. `arrived` [T, tiles] is zero before and after.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    j = tl.arange(0, KP)
    if slot % TOP_K == 0:  # a token whose every slot is skipped gets zeros from its first slot's program
        own = tl.load(ids + slot + j, mask=j < TOP_K, other=-1)
        if tl.sum(((own >= 0) & (own < E)).to(tl.int32), 0) == 0:
            tl.store(y + (slot // TOP_K) * d + n, tl.zeros((BN,), y.dtype.element_ty), mask=n < d)
    e = tl.load(ids + slot)
    if (e < 0) | (e >= E):
        return
    leads, slots, count = _members(ids, slot, e, S, SP, BM)
    if not leads:
        return
    live = tl.arange(0, BM) < count
    out = dot_down(
        h + slots * m, live, w + e.to(tl.int64) * w_expert, w, s + e.to(tl.int64) * s_expert, b + e * d, e, tile * BN,
        d, m, w_row, w_col, s_row, s_col, BM, BN, BK, EVEN, BIAS, QN, QK, False,
    )  # fmt: skip
    out *= tl.load(gates + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    mine = live[:, None] & (n < d)[None, :]
    tl.store(partial + slots[:, None] * d + n[None, :], out, mask=mine)
    tl.debug_barrier()
    _settle(partial, ids, arrived, y, slots, live, tile, n, E, d, TOP_K, KP, BM, BN)


@triton.jit
def _settle(
    partial, ids, arrived, y, slots, live, tile, n, E, d,
    TOP_K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Announce this program's parts; where they were a token's last, add all its parts in slot order."""
    j = tl.arange(0, KP)
    token = slots // TOP_K
    every = tl.load(ids + token[:, None] * TOP_K + j[None, :], mask=live[:, None] & (j < TOP_K)[None, :], other=-1)
    kept = tl.sum(((every >= 0) & (every < E)).to(tl.int32), 1)
    counter = arrived + token * tl.num_programs(0) + tile
    last = live & (tl.atomic_add(counter, 1, mask=live, sem="acq_rel") == kept - 1)
    if tl.sum(last.to(tl.int32), 0) > 0:
        total = tl.zeros((BM, BN), tl.float32)
        for slot in range(TOP_K):
            other = tl.load(ids + token * TOP_K + slot, mask=last, other=-1)
            there = (last & (other >= 0) & (other < E))[:, None] & (n < d)[None, :]
            part = partial + (token * TOP_K + slot)[:, None] * d + n[None, :]
            total += tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
        out = y + token[:, None] * d + n[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=last[:, None] & (n < d)[None, :])
        tl.store(counter, tl.zeros((BM,), tl.int32), mask=last)
