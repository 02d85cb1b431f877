"""Triton kernels. They know tensors, not models: slots, experts, projections.

Three families, by number of tokens. `one_*`: a matrix-vector product per slot, whole rows in flight at once. `few_*`:
one program per (slot, tile of columns); the first slot of an expert takes along every other slot of it, so each needed
expert is read once. `many_*`: kept slots are sorted by expert on the device and multiplied in tiles. In all of them a
skipped slot costs nothing but its program's first load. A slot is skipped where its id is not in [0, E).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """activation.reference for gated experts."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == 0:
        return gate * tl.sigmoid(gate) * up
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner) * up  # 0.5 · (1 + tanh z) = sigmoid(2 z)
    else:
        return gate * tl.sigmoid(ALPHA * gate) * (up + 1)


@triton.jit
def _dot_up(
    x_rows, live, w, b, e, n, d, m, w_row, w_col, b_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """act(x W_gateᵀ) ∘ (x W_upᵀ): [BM, BN] in fp32. x_rows points at the rows' starts; w at expert e's first weight."""
    k = tl.arange(0, BK)
    inside = n < m
    gate_row = n * 2 if INTERLEAVED else n
    up_row = gate_row + 1 if INTERLEAVED else n + m
    gates = w + gate_row[None, :] * w_row + k[:, None] * w_col
    ups = w + up_row[None, :] * w_row + k[:, None] * w_col
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, d, BK):
        full = live[:, None] if EVEN else live[:, None] & (start + k < d)[None, :]
        column = inside[None, :] if EVEN else inside[None, :] & (start + k < d)[:, None]
        x = tl.load(x_rows[:, None] + start + k[None, :], mask=full, other=0.0)
        gate = tl.dot(x, tl.load(gates + start * w_col, mask=column, other=0.0), gate)
        if GATED:
            up = tl.dot(x, tl.load(ups + start * w_col, mask=column, other=0.0), up)
    if BIAS:
        gate += tl.load(b + e * b_row + gate_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(b + e * b_row + up_row, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        return _activate(gate, up, KIND, ALPHA, LIMIT)
    else:
        gate = tl.maximum(gate, 0.0)
        return gate * gate


@triton.jit
def _dot_down(
    h_rows, live, w, b, e, n, d, m, w_row, w_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """h W_downᵀ (+ b): [BM, BN] in fp32."""
    k = tl.arange(0, BK)
    inside = n < d
    columns = w + n[None, :] * w_row + k[:, None] * w_col
    out = tl.zeros((BM, BN), tl.float32)
    for start in range(0, m, BK):
        full = live[:, None] if EVEN else live[:, None] & (start + k < m)[None, :]
        column = inside[None, :] if EVEN else inside[None, :] & (start + k < m)[:, None]
        h = tl.load(h_rows[:, None] + start + k[None, :], mask=full, other=0.0)
        out = tl.dot(h, tl.load(columns + start * w_col, mask=column, other=0.0), out)
    if BIAS:
        out += tl.load(b + e * d + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return out


# ---- one token, or very few --------------------------------------------------------------------------------------------


@triton.jit
def _row_dot(rows, x, k, d, inside, EVEN: tl.constexpr):
    """Rows [BN] of a matrix times x [BK]: [BN] in fp32."""
    mask = inside[:, None] if EVEN else inside[:, None] & (k < d)[None, :]
    w = tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def one_up(
    x, ids, w, b, h, E, d, m, x_row, w_expert, w_row, w_col, b_row,
    TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """h [S, m] ← act of the up product, slot by slot. Grid (tiles of m, S)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    s = tl.program_id(1)
    e = tl.load(ids + s)
    if (e < 0) | (e >= E):
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < m
    gate_row = n * 2 if INTERLEAVED else n
    up_row = gate_row + 1 if INTERLEAVED else n + m
    base = w + e.to(tl.int64) * w_expert
    gate = tl.zeros((BN,), tl.float32)
    up = tl.zeros((BN,), tl.float32)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        v = tl.load(x + (s // TOP_K) * x_row + k, mask=k < d, other=0.0).to(tl.float32)
        gate += _row_dot(base + gate_row[:, None] * w_row + k[None, :] * w_col, v, k, d, inside, EVEN)
        if GATED:
            up += _row_dot(base + up_row[:, None] * w_row + k[None, :] * w_col, v, k, d, inside, EVEN)
    if BIAS:
        gate += tl.load(b + e * b_row + gate_row, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(b + e * b_row + up_row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        out = _activate(gate, up, KIND, ALPHA, LIMIT)
    else:
        gate = tl.maximum(gate, 0.0)
        out = gate * gate
    tl.store(h + s * m + n, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
def one_down(
    h, ids, gates, w, b, y, E, d, m, w_expert, w_row, w_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, T).

    All slots are one tile [KP, BN, BK]. With EARLY the kernel starts while the up product still runs: it fetches its
    weights, which nobody is writing, and only then waits for h.
    """
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, KP)
    e = tl.load(ids + t * TOP_K + j, mask=j < TOP_K, other=-1)
    kept = (e >= 0) & (e < E)
    rows = w + tl.where(kept, e, 0).to(tl.int64)[:, None, None] * w_expert + n[None, :, None] * w_row
    there = kept[:, None, None] & (n < d)[None, :, None]
    part = tl.zeros((KP, BN), tl.float32)
    for start in range(0, m, BK):
        k = start + tl.arange(0, BK)
        mask = there if EVEN else there & (k < m)[None, None, :]
        tile = tl.load(rows + k[None, None, :] * w_col, mask=mask, other=0.0, eviction_policy="evict_first")
        if EARLY:
            tl.extra.cuda.gdc_wait()
        v = tl.load(h + (t * TOP_K + j)[:, None] * m + k[None, :], mask=kept[:, None] & (k < m)[None, :], other=0.0)
        part += tl.sum(tile.to(tl.float32) * v.to(tl.float32)[:, None, :], 2)
    if BIAS:
        bias = b + tl.where(kept, e, 0)[:, None] * d + n[None, :]
        part += tl.load(bias, mask=kept[:, None] & (n < d)[None, :], other=0.0).to(tl.float32)
    gate = tl.load(gates + t * TOP_K + j, mask=kept, other=0.0).to(tl.float32)
    tl.store(y + t * d + n, tl.sum(part * gate[:, None], 0).to(y.dtype.element_ty), mask=n < d)


# ---- few tokens ------------------------------------------------------------------------------------------------------


@triton.jit
def _members(ids, s, e, S, SP: tl.constexpr, BM: tl.constexpr):
    """(whether slot s is its expert's first, the expert's slots [BM], how many there are)."""
    lanes = tl.arange(0, SP)
    same = tl.load(ids + lanes, mask=lanes < S, other=-1) == e
    first = tl.min(tl.where(same, lanes, SP), 0)
    order = tl.cumsum(same.to(tl.int32), 0) - 1
    rows = tl.arange(0, BM)
    slots = tl.sum(tl.where(same[None, :] & (order[None, :] == rows[:, None]), lanes[None, :], 0), 1)
    return first == s, slots, tl.sum(same.to(tl.int32), 0)


@triton.jit
def few_up(
    x, ids, w, b, h, S, E, d, m, x_row, w_expert, w_row, w_col, b_row,
    TOP_K: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """h [S, m] ← act of the up product, for the kept slots. Grid (tiles of m, S)."""
    s = tl.program_id(1)
    e = tl.load(ids + s)
    if (e < 0) | (e >= E):
        return
    leads, slots, count = _members(ids, s, e, S, SP, BM)
    if not leads:
        return
    live = tl.arange(0, BM) < count
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    out = _dot_up(
        x + (slots // TOP_K) * x_row, live, w + e.to(tl.int64) * w_expert, b, e, n, d, m, w_row, w_col, b_row,
        BM, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    tl.store(h + slots[:, None] * m + n[None, :], out.to(h.dtype.element_ty), mask=live[:, None] & (n < m)[None, :])


@triton.jit
def few_down(
    h, ids, gates, w, b, partial, arrived, y, S, E, d, m, w_expert, w_row, w_col,
    TOP_K: tl.constexpr, KP: tl.constexpr, SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y [T, d] ← Σ over a token's kept slots of gate · (h W_downᵀ). Grid (tiles of d, S).

    Each program leaves its slots' parts in `partial` [S, d]; the last one to arrive at a token adds the parts in slot
    order, so the sum does not depend on the order of arrival. `arrived` [T, tiles] is zero before and after.
    """
    s = tl.program_id(1)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    j = tl.arange(0, KP)
    if s % TOP_K == 0:  # a token whose every slot is skipped gets zeros from its first slot's program
        own = tl.load(ids + s + j, mask=j < TOP_K, other=-1)
        if tl.sum(((own >= 0) & (own < E)).to(tl.int32), 0) == 0:
            tl.store(y + (s // TOP_K) * d + n, tl.zeros((BN,), y.dtype.element_ty), mask=n < d)
    e = tl.load(ids + s)
    if (e < 0) | (e >= E):
        return
    leads, slots, count = _members(ids, s, e, S, SP, BM)
    if not leads:
        return
    live = tl.arange(0, BM) < count
    out = _dot_down(
        h + slots * m, live, w + e.to(tl.int64) * w_expert, b, e, n, d, m, w_row, w_col, BM, BN, BK, EVEN, BIAS
    )
    out *= tl.load(gates + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    mine = live[:, None] & (n < d)[None, :]
    tl.store(partial + slots[:, None] * d + n[None, :], out, mask=mine)
    tl.debug_barrier()
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
        tl.store(
            y + token[:, None] * d + n[None, :], total.to(y.dtype.element_ty), mask=last[:, None] & (n < d)[None, :]
        )
        tl.store(counter, tl.zeros((BM,), tl.int32), mask=last)


# ---- many tokens -----------------------------------------------------------------------------------------------------


@triton.jit
def many_rank(ids, counts, rank, S, E, BLOCK: tl.constexpr):
    """rank [S] ← number among its expert's slots; counts [E] from zero. The order of ranks has no influence on results."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids + s, mask=s < S, other=-1)
    kept = (e >= 0) & (e < E)
    tl.store(rank + s, tl.atomic_add(counts + e, 1, mask=kept, sem="relaxed"), mask=s < S)


@triton.jit
def many_sort(ids, counts, rank, order, S, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    """order ← kept slots, expert after expert."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, EP)
    count = tl.load(counts + lanes, mask=lanes < E, other=0)
    e = tl.load(ids + s, mask=s < S, other=-1)
    kept = (e >= 0) & (e < E)
    start = tl.sum(tl.where(lanes[None, :] < e[:, None], count[None, :], 0), 1)
    tl.store(order + start + tl.load(rank + s, mask=kept, other=0), s, mask=kept)


@triton.jit
def many_tiles(counts, tile_expert, tile_start, E, EP: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """For each tile of at most BM slots: its expert (−1 past the last) and where its slots start in `order`."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, EP)
    count = tl.load(counts + lanes, mask=lanes < E, other=0)
    ends = tl.cumsum((count + BM - 1) // BM, 0)
    before = (ends[None, :] <= t[:, None]) & (lanes < E)[None, :]
    e = tl.sum(before.to(tl.int32), 1)
    tiles_before = tl.sum(tl.where(before, ((count + BM - 1) // BM)[None, :], 0), 1)
    slots_before = tl.sum(tl.where(before, count[None, :], 0), 1)
    tl.store(tile_expert + t, tl.where(e < E, e, -1))
    tl.store(tile_start + t, slots_before + (t - tiles_before) * BM)


@triton.jit
def _tile(counts, tile_expert, tile_start, order, t, BM: tl.constexpr, EP: tl.constexpr):
    """(expert, slots [BM], which are there) of tile t."""
    e = tl.load(tile_expert + t)
    start = tl.load(tile_start + t)
    lanes = tl.arange(0, EP)
    end = tl.sum(tl.load(counts + lanes, mask=lanes <= e, other=0), 0)
    rows = start + tl.arange(0, BM)
    live = rows < end
    return tl.load(order + rows, mask=live, other=0), live


@triton.jit
def many_up(
    x, counts, tile_expert, tile_start, order, w, b, h, d, m, x_row, w_expert, w_row, w_col, b_row,
    TOP_K: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """h [S, m] for the kept slots, in slot order. Grid (tiles of m, tiles of slots)."""
    t = tl.program_id(1)
    e = tl.load(tile_expert + t)
    if e < 0:
        return
    slots, live = _tile(counts, tile_expert, tile_start, order, t, BM, EP)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    out = _dot_up(
        x + (slots // TOP_K).to(tl.int64) * x_row, live, w + e.to(tl.int64) * w_expert, b, e, n, d, m, w_row, w_col, b_row,
        BM, BN, BK, EVEN, GATED, INTERLEAVED, BIAS, KIND, ALPHA, LIMIT,
    )  # fmt: skip
    rows = h + slots.to(tl.int64)[:, None] * m
    tl.store(rows + n[None, :], out.to(h.dtype.element_ty), mask=live[:, None] & (n < m)[None, :])


@triton.jit
def many_down(
    h, gates, counts, tile_expert, tile_start, order, w, b, parts, d, m, w_expert, w_row, w_col,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """parts [S, d] ← gate · (h W_downᵀ) for the kept slots. Grid (tiles of d, tiles of slots)."""
    t = tl.program_id(1)
    e = tl.load(tile_expert + t)
    if e < 0:
        return
    slots, live = _tile(counts, tile_expert, tile_start, order, t, BM, EP)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    out = _dot_down(
        h + slots.to(tl.int64) * m,
        live,
        w + e.to(tl.int64) * w_expert,
        b,
        e,
        n,
        d,
        m,
        w_row,
        w_col,
        BM,
        BN,
        BK,
        EVEN,
        BIAS,
    )
    out *= tl.load(gates + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    rows = parts + slots.to(tl.int64)[:, None] * d
    tl.store(rows + n[None, :], out.to(parts.dtype.element_ty), mask=live[:, None] & (n < d)[None, :])


@triton.jit
def many_sum(parts, ids, y, E, d, TOP_K: tl.constexpr, BN: tl.constexpr):
    """y [T, d] ← sum of a token's kept parts, in slot order, fp32. Grid (tiles of d, T)."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for slot in range(TOP_K):
        e = tl.load(ids + token * TOP_K + slot)
        there = (n < d) & (e >= 0) & (e < E)
        total += tl.load(parts + (token * TOP_K + slot) * d + n, mask=there, other=0.0).to(tl.float32)
    tl.store(y + token * d + n, total.to(y.dtype.element_ty), mask=n < d)
