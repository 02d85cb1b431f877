"""Attention of one new token per sequence over its cache, queries grouped by key head.

transformers' SDPA path copies the cache once for every query head before it attends. Here each program reads its share of
one key head's cache once, for all queries of that head; the last program to arrive joins the shares in order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _share(
    query, k, v, mask, begin, end, scale, k_pos, v_pos,
    D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr, BS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values over positions begin … end: [GP], [GP], [GP, DP] in fp32, base 2."""
    dim = tl.arange(0, DP)
    top = tl.full((GP,), -float("inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, DP), tl.float32)
    for start in range(begin, end, BS):
        at = start + tl.arange(0, BS)
        seen = at < end
        if MASKED:
            seen = seen & (tl.load(mask + at, mask=seen, other=0) != 0)
        key = tl.load(k + at[None, :] * k_pos + dim[:, None], mask=seen[None, :] & (dim < D)[:, None], other=0.0)
        score = tl.where(seen[None, :], tl.dot(query, key, input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet
        weight = tl.exp2(score - level[:, None])
        before = tl.exp2(top - level)
        value = tl.load(v + at[:, None] * v_pos + dim[None, :], mask=seen[:, None] & (dim < D)[None, :], other=0.0)
        out = out * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * before + tl.sum(weight, 1)
        top = new_top
    return top, total, out


@triton.jit
def attend(
    q, k, v, mask, parts, tops, totals, arrived, y, scale, S, H, step,
    q_seq, q_head, k_seq, k_head, k_pos, v_seq, v_head, v_pos, mask_seq,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [B, H · G, D] from q [B, H · G, D], k and v [B, H, S, D], mask [B, S]. Grid (B · H, SPLITS), `step` positions each.

    parts [B · H, SPLITS, G, D], tops and totals [B · H, SPLITS, G]; `arrived` [B · H] is zero before and after.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b, h = pair // H, pair % H
    g, dim = tl.arange(0, GP), tl.arange(0, DP)
    inside = (g < G)[:, None] & (dim < D)[None, :]
    query = tl.load(q + b * q_seq + (h * G + g)[:, None] * q_head + dim[None, :], mask=inside, other=0.0)
    keys = k + b.to(tl.int64) * k_seq + h * k_head
    values = v + b.to(tl.int64) * v_seq + h * v_head
    top, total, out = _share(
        query, keys, values, mask + b * mask_seq, split * step, tl.minimum(S, (split + 1) * step), scale, k_pos, v_pos,
        D, DP, GP, BS, MASKED,
    )  # fmt: skip
    if (
        EARLY
    ):  # not before: the kernel behind fetches weights at once, and this one's own loads would queue up behind them
        tl.extra.cuda.gdc_launch_dependents()
    at = y + (pair * G + g)[:, None] * D + dim[None, :]
    if SPLITS == 1:
        tl.store(at, (out / total[:, None]).to(y.dtype.element_ty), mask=inside)
    else:
        row = (pair * SPLITS + split) * G + g
        tl.store(parts + row[:, None] * D + dim[None, :], out, mask=inside)
        tl.store(tops + row, top, mask=g < G)
        tl.store(totals + row, total, mask=g < G)
        tl.debug_barrier()
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == SPLITS - 1:
            highest = tl.full((GP,), -float("inf"), tl.float32)
            for other in tl.static_range(SPLITS):
                line = (pair * SPLITS + other) * G + g
                found = tl.load(tops + line, mask=g < G, other=-float("inf"), cache_modifier=".cg")
                highest = tl.maximum(highest, found)
            joined = tl.zeros((GP, DP), tl.float32)
            sums = tl.zeros((GP,), tl.float32)
            for other in tl.static_range(SPLITS):
                line = (pair * SPLITS + other) * G + g
                factor = tl.exp2(tl.load(tops + line, mask=g < G, other=0.0, cache_modifier=".cg") - highest)
                sums += factor * tl.load(totals + line, mask=g < G, other=1.0, cache_modifier=".cg")
                part = tl.load(parts + line[:, None] * D + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
                joined += factor[:, None] * part
            tl.store(at, (joined / sums[:, None]).to(y.dtype.element_ty), mask=inside)
            tl.store(arrived + pair, 0)
