"""One token, or a few, times whole matrices: bound by reading the weights, which nobody is writing.

A program fetches its rows of the weights first and only then waits for the kernel in front, so that the matrix is on its way
while what comes before it still runs. Tokens share them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import add_row, both, by_eight, rms_norm


@triton.jit
def _row(x, K, BK: tl.constexpr, STEPS: tl.constexpr):
    """x [K] in STEPS tiles of BK, on its way from memory."""
    tiles = ()
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        tiles += (tl.load(x + k, mask=k < K, other=0.0),)
    return tiles


@triton.jit
def _sums(parts, axis: tl.constexpr, T: tl.constexpr):
    """The sum of each of T tensors along an axis."""
    found = ()
    for t in tl.static_range(0, T - 1, 2):
        found += tl.reduce((parts[t], parts[t + 1]), axis, both)
    if T % 2 == 1:
        found += (tl.sum(parts[T - 1], axis),)
    return found


@triton.jit
def _squares(row, BK: tl.constexpr, STEPS: tl.constexpr):
    square = tl.zeros((BK,), tl.float32)
    for step in tl.static_range(STEPS):
        v = row[step].to(tl.float32)
        square += v * v
    return square


@triton.jit
def _product(
    tiles, row, scales, root, normed, K, keep,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
    ROUNDED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Rows times one token, sums of eight: [BN, BK / 8] in fp32; KEEP: where `keep`, normed [K] ← the token's norm."""
    total = tl.zeros((BN, BK // 8), tl.float32)
    for step in tl.static_range(STEPS):
        v = row[step].to(tl.float32)
        if NORM:
            v = rms_norm(v, scales[step].to(tl.float32), root, PLUS, ROUNDED, row[step].dtype)
            if KEEP:
                k = step * BK + tl.arange(0, BK)
                tl.store(normed + k, v.to(row[step].dtype), mask=(k < K) & keep)
        total += by_eight(tiles[step].to(tl.float32) * v[None, :])
    return total


@triton.jit
def gemv(
    x, scale, add, w0, w1, w2, w3, y, normed, t1, t2, t3, n0, n1, n2, n3, K, eps,
    T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
    ROUNDED: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y ← up to four matrices w [n, K] times norm(x) [T, K], each one's [T, n] behind the other's; KEEP: normed ← norm(x).

    ADD: plus `add`, which is like y. Grid: tiles of BN rows, those of w1 from t1 on, of w2 from t2 on, of w3 from t3 on; all of
    K in STEPS tiles of BK.
    """
    tile = tl.program_id(0)
    second, third, fourth = tile >= t1, tile >= t2, tile >= t3
    w = tl.where(fourth, w3, tl.where(third, w2, tl.where(second, w1, w0)))
    rows = tl.where(fourth, n3, tl.where(third, n2, tl.where(second, n1, n0)))
    first = tl.where(fourth, t3, tl.where(third, t2, tl.where(second, t1, 0)))
    column = tl.where(fourth, n0 + n1 + n2, tl.where(third, n0 + n1, tl.where(second, n0, 0)))
    n = (tile - first) * BN + tl.arange(0, BN)
    inside = n < rows
    tiles = ()
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        at = w + n.to(tl.int64)[:, None] * K + k[None, :]
        tiles += (tl.load(at, mask=inside[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"),)
    scales = _row(scale, K, BK, STEPS) if NORM else tiles
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_rows, squares, added, totals = (), (), (), ()
    at = T * column + n
    for t in tl.static_range(T):
        x_rows += (_row(x + t * K, K, BK, STEPS),)
    if ADD:
        for t in tl.static_range(T):
            added += (tl.load(add + at + t * rows, mask=inside, other=0.0),)
    if NORM:
        for t in tl.static_range(T):
            squares += (_squares(x_rows[t], BK, STEPS),)
        squares = _sums(squares, 0, T)
    for t in tl.static_range(T):
        root = tl.rsqrt(squares[t] / K + eps) if NORM else 1.0
        keep, place = tile == 0, normed + t * K
        totals += (_product(tiles, x_rows[t], scales, root, place, K, keep, BN, BK, STEPS, NORM, PLUS, ROUNDED, KEEP),)
    totals = _sums(totals, 1, T)
    for t in tl.static_range(T):
        out = add_row(totals[t].to(y.dtype.element_ty), added[t] if ADD else 0.0, ADD)
        tl.store(y + at + t * rows, out, mask=inside)
