"""Thresholds that keep their budget: the formula of `runtime/tracking.py` in one small launch over all layers' counters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def track(addresses, tau, target, seen, L, WIDTH, RATE, LOWEST, HIGHEST, LP: tl.constexpr):
    """τ [R] moves towards `target` [R] by what was counted since `seen` [R, 2]; counts [R, 3] lie at L addresses. Grid (R)."""
    row, layer = tl.program_id(0), tl.arange(0, LP)
    counts = tl.load(addresses + layer, mask=layer < L, other=0).to(tl.pointer_type(tl.int64)) + 3 * row
    routed = tl.sum(tl.load(counts, mask=layer < L, other=0), 0)
    kept = tl.sum(tl.load(counts + 1, mask=layer < L, other=0), 0)
    new_routed = (routed - tl.load(seen + 2 * row)).to(tl.float32)
    new_kept = (kept - tl.load(seen + 2 * row + 1)).to(tl.float32)
    asked, old = tl.load(target + row), tl.load(tau + row)
    live = (new_routed > 0) & (asked == asked)
    skipped = 1.0 - new_kept / tl.maximum(new_routed, 1.0)
    rate = RATE * tl.minimum(tl.sqrt_rn(tl.maximum(new_routed, 0.0) / WIDTH) * 0.5, 1.0)
    moved = tl.log(tl.minimum(tl.maximum(old, LOWEST), HIGHEST)) + rate * (tl.where(live, asked, 0.0) - skipped)
    tl.store(tau + row, tl.minimum(tl.maximum(tl.exp(moved), LOWEST), HIGHEST), mask=live)
    tl.store(seen + 2 * row, routed)
    tl.store(seen + 2 * row + 1, kept)
