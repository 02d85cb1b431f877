"""Thresholds that keep their budget: the formula of `runtime/tracking.py` in one small launch over all layers' counters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def track(addresses, tau, target, seen, L, R, WIDTH, RATE, LOWEST, HIGHEST, LP: tl.constexpr, RP: tl.constexpr):
    """τ [R] moves towards `target` [R] by what was counted since `seen` [R, 2]; counts [R, 3] lie at L addresses. Grid (1)."""
    layer, row = tl.arange(0, LP), tl.arange(0, RP)
    counts = tl.load(addresses + layer, mask=layer < L, other=0).to(tl.pointer_type(tl.int64))
    at, there = counts[:, None] + 3 * row[None, :], (layer < L)[:, None] & (row < R)[None, :]
    routed = tl.sum(tl.load(at, mask=there, other=0), 0)
    kept = tl.sum(tl.load(at + 1, mask=there, other=0), 0)
    new_routed = (routed - tl.load(seen + 2 * row, mask=row < R, other=0)).to(tl.float32)
    new_kept = (kept - tl.load(seen + 2 * row + 1, mask=row < R, other=0)).to(tl.float32)
    asked = tl.load(target + row, mask=row < R, other=float("nan"))
    old = tl.load(tau + row, mask=row < R, other=1.0)
    live = (new_routed > 0) & (asked == asked)
    skipped = 1.0 - new_kept / tl.maximum(new_routed, 1.0)
    rate = RATE * tl.minimum(tl.sqrt_rn(tl.maximum(new_routed, 0.0) / WIDTH) * 0.5, 1.0)
    moved = tl.log(tl.minimum(tl.maximum(old, LOWEST), HIGHEST)) + rate * (tl.where(live, asked, 0.0) - skipped)
    moved = tl.minimum(tl.maximum(tl.exp(moved), LOWEST), HIGHEST)
    tl.store(tau + row, moved, mask=live)
    tl.store(seen + 2 * row, routed, mask=row < R)
    tl.store(seen + 2 * row + 1, kept, mask=row < R)
