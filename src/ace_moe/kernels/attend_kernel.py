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
def _tiled(x, D: tl.constexpr, DP: tl.constexpr, far: tl.constexpr = False):
    """What x [R] points at, or each value's partner in the other half: [R, DP], on its way from memory.

    Pointers are spread out first: what is loaded as a row becomes a tile by way of shared memory, where all wait for it.
    """
    dim = tl.arange(0, DP)
    at = tl.where(dim < D // 2, dim + D // 2, dim - D // 2) if far else dim
    return tl.load(x[:, None] + at[None, :], mask=(dim < D)[None, :], other=0.0)


@triton.jit
def _halves(x, D: tl.constexpr, DP: tl.constexpr):
    """Values and their partners."""
    return _tiled(x, D, DP), _tiled(x, D, DP, True)


@triton.jit
def _turned(
    x, scale, cos, sin, eps,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Heads normed and turned by their position: [R, DP]. x and scale with partners, cos and sin: tiles [R, DP]."""
    dtype: tl.constexpr = x[0].dtype
    v, w = x[0].to(tl.float32), x[1].to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        v = rms_norm(v, scale[0].to(tl.float32), root, PLUS, ROUNDED, dtype)
        w = rms_norm(w, scale[1].to(tl.float32), root, PLUS, ROUNDED, dtype)
    w = tl.where((tl.arange(0, DP) < D // 2)[None, :], -w, w)
    return (v * cos.to(tl.float32) + w * sin.to(tl.float32)).to(dtype)


@triton.jit
def _own(
    heads, new_k, new_v, keys, values, q_scale, k_scale, cos, sin, eps, scale, place, begin, end, k_pos, v_pos,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """The query [GP, DP], and maximum, sum and values with the new token alone, or of nothing if its place is another's.

    Its key and value go to their place in the cache. All it reads is asked for before any of it is waited for.
    """
    mine = (place >= begin) & (place < end)
    row, dim = tl.arange(0, GP), tl.arange(0, DP)
    every = tl.zeros((GP,), tl.int32)  # the key for each query: so it is where they are
    query, key = _halves(heads, D, DP), _halves(new_k + every, D, DP)
    cosine, sine = _tiled(cos + every, D, DP), _tiled(sin + every, D, DP)
    value = _tiled(new_v + every, D, DP)
    query = _turned(query, q_scale, cosine, sine, eps, D, DP, NORM, PLUS, ROUNDED)
    key = _turned(key, k_scale, cosine, sine, eps, D, DP, NORM, PLUS, ROUNDED)
    once = mine & (row == 0)[:, None] & (dim < D)[None, :]
    tl.store(keys + place * k_pos + every[:, None] + dim[None, :], key, mask=once)
    tl.store(values + place * v_pos + every[:, None] + dim[None, :], value, mask=once)
    top = tl.where(mine, tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale, -float("inf"))
    total = tl.where(mine, 1.0, 0.0) + tl.zeros((GP,), tl.float32)
    return query, top, total, tl.where(mine, value.to(tl.float32), 0.0)


@triton.jit
def _joined(
    parts,
    tops,
    totals,
    pair,
    G: tl.constexpr,
    JP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """All programs' shares, in order: [JP, DP]. All are asked for at once, and then waited for."""
    g, dim = tl.arange(0, JP), tl.arange(0, DP)
    found = ()
    for other in tl.static_range(SPLITS):
        line = (pair * SPLITS + other) * G + g
        part = parts + line[:, None] * D + dim[None, :]
        found += (
            tl.load(tops + line, mask=g < G, other=-float("inf"), cache_modifier=".cg"),
            tl.load(totals + line, mask=g < G, other=1.0, cache_modifier=".cg"),
            tl.load(part, mask=(g < G)[:, None] & (dim < D)[None, :], other=0.0, cache_modifier=".cg"),
        )
    highest = found[0]
    for other in tl.static_range(1, SPLITS):
        highest = tl.maximum(highest, found[3 * other])
    joined = tl.zeros((JP, DP), tl.float32)
    sums = tl.zeros((JP,), tl.float32)
    for other in tl.static_range(SPLITS):
        factor = tl.exp2(found[3 * other] - highest)
        sums += factor * found[3 * other + 1]
        joined += factor[:, None] * found[3 * other + 2]
    return joined / sums[:, None]


@triton.jit
def _share(
    out, top, total, g, dim, inside, pair, split, parts, tops, totals, arrived, y,
    G: tl.constexpr, JP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this program's share of y, [GP, DP] at (g, dim); the last program to arrive joins the shares."""
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
            joined = _joined(parts, tops, totals, pair, G, JP, D, DP, SPLITS).to(y.dtype.element_ty)
            line = tl.arange(0, JP)[:, None]
            tl.store(y + (pair * G + line) * D + dim[None, :], joined, mask=(line < G) & (dim < D)[None, :])
            tl.store(arrived + pair, 0)


@triton.jit
def attend(
    q, k, v, mask, new_k, new_v, q_scale, k_scale, cos, sin, place, parts, tops, totals, arrived, y, scale, eps, S, H, step,
    q_seq, q_head, k_seq, k_head, k_pos, v_seq, v_head, v_pos, mask_seq, new_k_seq, new_v_seq, turn_seq,
    G: tl.constexpr, GP: tl.constexpr, JP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    SPLITS: tl.constexpr, MASKED: tl.constexpr, TOKEN: tl.constexpr, SHORT: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
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
    keys = k + b.to(tl.int64) * k_seq + h.to(tl.int64) * k_head
    values = v + b.to(tl.int64) * v_seq + h.to(tl.int64) * v_head
    mask += b * mask_seq
    own = tl.load(place) if TOKEN else -1
    if EARLY and not TOKEN:
        tl.extra.cuda.gdc_wait()
    key, value, seen = _tile(keys, values, mask, begin + tl.arange(0, BS), end, own, k_pos, v_pos, D, DP, MASKED)
    if TOKEN:
        q_scales = _halves(q_scale + tl.zeros((GP,), tl.int32), D, DP) if NORM else q_scale
        k_scales = _halves(k_scale + tl.zeros((GP,), tl.int32), D, DP) if NORM else k_scale
    if EARLY and TOKEN:
        tl.extra.cuda.gdc_wait()
        if SHORT:
            tl.extra.cuda.gdc_launch_dependents()
    heads = q + b * q_seq + (h * G + tl.minimum(g, G - 1)) * q_head
    if TOKEN:
        query, top, total, out = _own(
            heads, new_k + b * new_k_seq + h * D, new_v + b * new_v_seq + h * D, keys, values, q_scales, k_scales,
            cos + b * turn_seq, sin + b * turn_seq, eps, scale, own, begin, end, k_pos, v_pos,
            GP, D, DP, NORM, PLUS, ROUNDED,
        )  # fmt: skip
    else:
        query = tl.load(heads[:, None] + dim[None, :], mask=inside, other=0.0)
        top = tl.full((GP,), -float("inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        out = tl.zeros((GP, DP), tl.float32)
    top, total, out = _take(query, key, value, seen, top, total, out, scale)
    # with SHORT an empty range, not a branch: without the loop the compiler saves registers and asks for the token's key late
    for start in range(begin + BS, begin if SHORT else end, BS):
        at = start + tl.arange(0, BS)
        key, value, seen = _tile(keys, values, mask, at, end, own, k_pos, v_pos, D, DP, MASKED)
        top, total, out = _take(query, key, value, seen, top, total, out, scale)
    if EARLY and not SHORT:  # not before: the kernel behind fetches weights, and the cache would queue up behind them
        tl.extra.cuda.gdc_launch_dependents()
    _share(out, top, total, g, dim, inside, pair, split, parts, tops, totals, arrived, y, G, JP, D, DP, SPLITS)
