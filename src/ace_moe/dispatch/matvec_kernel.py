"""A dense product for very few tokens: y [M, N] = x [M, K] Wᵀ, bound by reading W."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matvec(
    x, w, b, y, N, K, x_row,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N), BK ≥ K. With EARLY the weights are on their way before the kernel in front has ended."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    rows = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide = rows.to(tl.float32)
    for t in tl.static_range(M):
        v = tl.load(x + t * x_row + k, mask=k < K, other=0.0).to(tl.float32)
        total = tl.sum(wide * v[None, :], 1)
        if BIAS:
            total += tl.load(b + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + t * N + n, total.to(y.dtype.element_ty), mask=n < N)
