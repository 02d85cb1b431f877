"""Products of one to four tokens with whole matrices: bound by reading the weights, which nobody is writing.

A program fetches its rows of the weights first and only then waits for the kernel in front, so that the matrix is on its way
while what comes before it still runs. An RMS norm in front is one factor for a token: it goes onto the finished sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products_kernel import add_row


@triton.jit
def _scale(scale, k, K, NORM: tl.constexpr, PLUS: tl.constexpr):
    """What a norm multiplies columns k by, beside its root."""
    if NORM:
        return tl.load(scale + k, mask=k < K, other=0.0).to(tl.float32) + (1.0 if PLUS else 0.0)
    else:
        return 1.0


@triton.jit
def _keep(x, scale, normed, root, K, BK: tl.constexpr, STEPS: tl.constexpr, PLUS: tl.constexpr):
    """The norm itself, for whoever else needs it."""
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * _scale(scale, k, K, True, PLUS)
        tl.store(normed + k, (v * root).to(normed.dtype.element_ty), mask=k < K)


@triton.jit
def few(
    x, scale, add, w0, w1, w2, w3, y, normed, t1, t2, t3, n0, n1, n2, n3, K, eps, x_row,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
    KEEP: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [M, n0 + n1 + …] ← norm(x) [M, K] times up to four matrices w [n, K], plus `add`; KEEP: normed [M, K] ← norm(x).

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
    sums, squares = (), ()
    for _ in tl.static_range(M):
        sums += (tl.zeros((BN, BK), tl.float32),)
        squares += (tl.zeros((BK,), tl.float32),)
    for step in tl.static_range(STEPS):
        k = step * BK + tl.arange(0, BK)
        weights = tiles[step].to(tl.float32)
        g = _scale(scale, k, K, NORM, PLUS)
        before, below = sums, squares
        sums, squares = (), ()
        for m in tl.static_range(M):
            v = tl.load(x + m * x_row + k, mask=k < K, other=0.0).to(tl.float32)
            sums += (before[m] + weights * (v * g)[None, :],)
            squares += (below[m] + v * v,)
    for m in tl.static_range(M):
        out = tl.sum(sums[m], 1)
        if NORM:
            root = tl.rsqrt(tl.sum(squares[m], 0) / K + eps)
            out *= root
            if KEEP:
                if tile == 0:
                    _keep(x + m * x_row, scale, normed + m * K, root, K, BK, STEPS, PLUS)
        at = m * (n0 + n1 + n2 + n3) + column + n
        tl.store(y + at, add_row(out.to(y.dtype.element_ty), add + at, inside, ADD), mask=inside)
