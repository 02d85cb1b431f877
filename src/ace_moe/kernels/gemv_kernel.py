"""One token times whole matrices: bound by reading the weights, which nobody is writing.

A program fetches its rows of the weights first and only then waits for the kernel in front, so that the matrix is on its way
while what comes before it still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import add_row, rms_norm


@triton.jit
def _root(x, K, eps, BK: tl.constexpr, STEPS: tl.constexpr):
    """(mean x² + eps)^-½."""
    square = tl.zeros((BK,), tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        square += v * v
    return tl.rsqrt(tl.sum(square, 0) / K + eps)


@triton.jit
def gemv(
    x, scale, add, w0, w1, w2, w3, y, normed, t1, t2, t3, n0, n1, n2, n3, K, eps,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr, ROUNDED: tl.constexpr,
    KEEP: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [n0 + n1 + …] ← up to four matrices w [n, K] times norm(x) [K], plus `add`; KEEP: normed [K] ← norm(x).

    Grid: tiles of BN rows, those of w1 from t1 on, of w2 from t2 on, of w3 from t3 on; all of K in STEPS tiles of BK.
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
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        root = _root(x, K, eps, BK, STEPS)
    total = tl.zeros((BN, BK), tl.float32)
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            g = tl.load(scale + k, mask=k < K, other=0.0).to(tl.float32)
            v = rms_norm(v, g, root, PLUS, ROUNDED, x.dtype.element_ty)
            if KEEP:
                tl.store(normed + k, v.to(normed.dtype.element_ty), mask=(k < K) & (tile == 0))
        total += tiles[step].to(tl.float32) * v[None, :]
    out = tl.sum(total, 1).to(y.dtype.element_ty)
    tl.store(y + column + n, add_row(out, add + column + n, inside, ADD), mask=inside)
