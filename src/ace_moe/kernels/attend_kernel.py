"""Attention of one new token per sequence over its cache, queries grouped by key head.

transformers' SDPA path copies the cache once for every query head before it attends. Here each program reads its share of
one key head's cache once, for all queries of that head; the last program to arrive joins the shares in order. What else is
done to the new token on its way (a norm, the turn by its position, the writing of its key and value) can be done here too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import rms_norm


@triton.jit
def _tile(k, v, mask, at, end, skip, k_pos, v_pos, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """Keys [DP, BS], values [BS, DP] and which positions are seen, on their way from memory; `skip` is not."""
    dim = tl.arange(0, DP)
    seen = (at < end) & (at != skip)
    if MASKED:
        seen = seen & (tl.load(mask + at, mask=at < end, other=0) != 0)
    key = tl.load(k + at[None, :] * k_pos + dim[:, None], mask=seen[None, :] & (dim < D)[:, None], other=0.0)
    value = tl.load(v + at[:, None] * v_pos + dim[None, :], mask=seen[:, None] & (dim < D)[None, :], other=0.0)
    return key, value, seen


@triton.jit
def _take(query, key, value, seen, top, total, out, scale):
    """Maximum, sum and weighted values [GP], [GP], [GP, DP] in fp32, base 2, with these positions' as well."""
    score = tl.where(seen[None, :], tl.dot(query, key, input_precision="ieee") * scale, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    level = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet
    weight = tl.exp2(score - level[:, None])
    before = tl.exp2(top - level)
    out = out * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_top, total * before + tl.sum(weight, 1), out


@triton.jit
def _turned(
    x, scale, cos, sin, eps,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Heads whose first values x [R] points at, normed and turned by their position: [R, DP]."""
    dim = tl.arange(0, DP)
    first, inside = dim < D // 2, (dim < D)[None, :]
    far = tl.where(first, dim + D // 2, dim - D // 2)  # the other half
    v = tl.load(x[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(x[:, None] + far[None, :], mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if NORM:
        root = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        v = rms_norm(v, tl.load(scale + dim, mask=dim < D, other=0.0).to(tl.float32), root, PLUS, ROUNDED, dtype)
        w = rms_norm(w, tl.load(scale + far, mask=dim < D, other=0.0).to(tl.float32), root, PLUS, ROUNDED, dtype)
    c = tl.load(cos + dim, mask=dim < D, other=0.0).to(tl.float32)
    s = tl.load(sin + dim, mask=dim < D, other=0.0).to(tl.float32)
    return (v * c + tl.where(first, -w, w) * s).to(dtype)


@triton.jit
def _own(
    heads, new_k, new_v, keys, values, q_scale, k_scale, cos, sin, eps, scale, place, begin, end, k_pos, v_pos,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """The query [GP, DP], and maximum, sum and values with the new token alone, or of nothing if its place is another's.

    Its key and value go to their place in the cache.
    """
    dim, mine = tl.arange(0, DP), (place >= begin) & (place < end)
    query = _turned(heads, q_scale, cos, sin, eps, D, DP, NORM, PLUS, ROUNDED)
    key = _turned(new_k + tl.arange(0, 1), k_scale, cos, sin, eps, D, DP, NORM, PLUS, ROUNDED)
    value = tl.load(new_v + dim, mask=dim < D, other=0.0)
    tl.store(keys + place * k_pos + tl.arange(0, 1)[:, None] + dim[None, :], key, mask=mine & (dim < D)[None, :])
    tl.store(values + place * v_pos + dim, value, mask=mine & (dim < D))
    top = tl.where(mine, tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale, -float("inf"))
    total = tl.where(mine, 1.0, 0.0) + tl.zeros((GP,), tl.float32)
    return query, top, total, tl.where(mine, value.to(tl.float32), 0.0)[None, :] + tl.zeros((GP, DP), tl.float32)


@triton.jit
def _joined(parts, tops, totals, pair, g, dim, inside, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    """All programs' shares, in order: [GP, DP]."""
    highest = tl.full(g.shape, -float("inf"), tl.float32)
    for other in tl.static_range(SPLITS):
        line = (pair * SPLITS + other) * G + g
        found = tl.load(tops + line, mask=g < G, other=-float("inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, found)
    joined = tl.zeros(inside.shape, tl.float32)
    sums = tl.zeros(g.shape, tl.float32)
    for other in tl.static_range(SPLITS):
        line = (pair * SPLITS + other) * G + g
        factor = tl.exp2(tl.load(tops + line, mask=g < G, other=0.0, cache_modifier=".cg") - highest)
        sums += factor * tl.load(totals + line, mask=g < G, other=1.0, cache_modifier=".cg")
        part = tl.load(parts + line[:, None] * D + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        joined += factor[:, None] * part
    return joined / sums[:, None]


@triton.jit
def attend(
    q, k, v, mask, new_k, new_v, q_scale, k_scale, cos, sin, place, parts, tops, totals, arrived, y, scale, eps, S, H, step,
    q_seq, q_head, k_seq, k_head, k_pos, v_seq, v_head, v_pos, mask_seq, new_k_seq, new_v_seq, turn_seq,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    MASKED: tl.constexpr, TOKEN: tl.constexpr, SHORT: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
    ROUNDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [B, H · G, D] from q [B, H · G, D], k and v [B, H, S, D], mask [B, S]. Grid (B · H, SPLITS), `step` positions each.

    parts [B · H, SPLITS, G, D], tops and totals [B · H, SPLITS, G]; `arrived` [B · H] is zero before and after. TOKEN: q is
    not yet normed and turned, nor are new_k and new_v [B, H, D] in the cache: the program whose share they are in puts them at
    `place`. Of the cache the rest is then nobody's to write, and its first tile is read before the kernel in front has ended.
    SHORT: that is all a program reads of it.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    b, h = pair // H, pair % H
    g, dim = tl.arange(0, GP), tl.arange(0, DP)
    inside = (g < G)[:, None] & (dim < D)[None, :]
    begin, end = split * step, tl.minimum(S, (split + 1) * step)
    keys = k + b.to(tl.int64) * k_seq + h * k_head
    values = v + b.to(tl.int64) * v_seq + h * v_head
    mask += b * mask_seq
    own = tl.load(place) if TOKEN else -1
    if EARLY and not TOKEN:
        tl.extra.cuda.gdc_wait()
    key, value, seen = _tile(keys, values, mask, begin + tl.arange(0, BS), end, own, k_pos, v_pos, D, DP, MASKED)
    if EARLY and TOKEN:
        tl.extra.cuda.gdc_wait()
        if SHORT:
            tl.extra.cuda.gdc_launch_dependents()
    heads = q + b * q_seq + (h * G + tl.minimum(g, G - 1)) * q_head
    if TOKEN:
        query, top, total, out = _own(
            heads, new_k + b * new_k_seq + h * D, new_v + b * new_v_seq + h * D, keys, values, q_scale, k_scale,
            cos + b * turn_seq, sin + b * turn_seq, eps, scale, own, begin, end, k_pos, v_pos,
            GP, D, DP, NORM, PLUS, ROUNDED,
        )  # fmt: skip
    else:
        query = tl.load(heads[:, None] + dim[None, :], mask=inside, other=0.0)
        top = tl.full((GP,), -float("inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        out = tl.zeros((GP, DP), tl.float32)
    top, total, out = _take(query, key, value, seen, top, total, out, scale)
    for start in range(begin + BS, end, BS):
        at = start + tl.arange(0, BS)
        key, value, seen = _tile(keys, values, mask, at, end, own, k_pos, v_pos, D, DP, MASKED)
        top, total, out = _take(query, key, value, seen, top, total, out, scale)
    if EARLY and not SHORT:  # not before: the kernel behind fetches weights, and the cache would queue up behind them
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
            joined = _joined(parts, tops, totals, pair, g, dim, inside, G, D, SPLITS)
            tl.store(at, joined.to(y.dtype.element_ty), mask=inside)
            tl.store(arrived + pair, 0)
