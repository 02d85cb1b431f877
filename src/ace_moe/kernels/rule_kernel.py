"""The rule as one Triton kernel: the same decisions as `rule.py`, to which tests tie it, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _share(gate, table, ids, there):
    """p = |g| A / (Σ |g| A + ε) over the slots of each token, [BT, KP]."""
    score = tl.abs(gate) * tl.load(table + ids, mask=there, other=0.0)
    return score / (tl.sum(score, 1)[:, None] + 1e-8)


@triton.jit
def _rank(c, ids):
    """0 for the largest of a token's contributions; ties go to the lower expert id."""
    mine, other = c[:, :, None], c[:, None, :]
    before = (other > mine) | ((other == mine) & (ids[:, None, :] < ids[:, :, None]))
    return tl.sum(before.to(tl.int32), 2)


@triton.jit
def _count(counts, real, keep):
    """counts [2] += routed, kept."""
    tl.atomic_add(counts, tl.sum(tl.sum(real.to(tl.int64), 1), 0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(tl.sum((real & keep).to(tl.int64), 1), 0), sem="relaxed")


@triton.jit
def settle(
    e, raw, t, there, first, second, threshold, mask, counts, out_ids, out_gates, E,
    K: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr, GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr,
    MIN_MASS: tl.constexpr, MASKED: tl.constexpr, PHASED: tl.constexpr = False, SQUARED: tl.constexpr = False,
):  # fmt: skip
    """Decide the slots of tokens t [BT]: ids e and gates raw [BT, KP], `there` where a slot exists.

    VIEWS 0: gate share (SQUARED: of g²), 1: table `first`, 2: both tables fused by FUSION 0 max, 1 min, 2 mean. GAIN 0
    kept, 1 none, 2 power.
    PHASED: `mask` [T] holds 0 for prefill, 1 for decode, 2 for padding; `threshold` is [2] and `counts` [2, 2] by phase.
    """
    j = tl.arange(0, e.shape[1])
    at = t[:, None] * K + j[None, :]
    gate = tl.where(there, raw.to(tl.float32), 0.0)
    if VIEWS == 0:
        c = gate * gate if SQUARED else tl.abs(gate)
        c = c / (tl.sum(c, 1)[:, None] + 1e-8)
    else:
        c = _share(gate, first, e, there)
    if VIEWS == 2:
        other = _share(gate, second, e, there)
        if FUSION == 0:
            c = tl.maximum(c, other)
        elif FUSION == 1:
            c = tl.minimum(c, other)
        else:
            c = (c + other) / 2
    best = there & (gate == tl.max(tl.where(there, gate, -float("inf")), 1)[:, None])
    lowest = tl.min(tl.where(best, e, 2147483647), 1)[:, None]
    c = tl.where(best & (e == lowest), float("inf"), tl.where(there, c, -float("inf")))
    if MIN_ACTIVE > 1:
        c = tl.where(there & (_rank(c, e) < MIN_ACTIVE), float("inf"), c)
    if MIN_MASS > 0:
        order = _rank(c, e)
        candidate = tl.where(c == float("inf"), 0.0, gate)
        earlier = order[:, None, :] >= order[:, :, None]
        skipped = tl.sum(tl.where(earlier, candidate[:, None, :], 0.0), 2)
        c = tl.where(there & (skipped > (1.0 - MIN_MASS) * tl.sum(gate, 1)[:, None]), float("inf"), c)
    tau = tl.load(threshold)
    if PHASED:
        phase = tl.load(mask + t).to(tl.int32)
        tau = tl.load(threshold + tl.minimum(phase, 1))[:, None]
    keep = there & ((c >= tau) | (c != c))
    untouched = tl.sum((there & (keep == 0)).to(tl.int32), 1)[:, None] == 0
    scaled = gate
    if GAIN == 0:
        kept = tl.sum(tl.where(keep, gate, 0.0), 1)[:, None]
        scaled = gate * tl.where(kept > 0, tl.sum(gate, 1)[:, None] / kept, 1.0)
    elif GAIN == 2:
        square = gate * gate
        kept = tl.sum(tl.where(keep, square, 0.0), 1)[:, None]
        scaled = gate * tl.sqrt_rn(tl.where(kept > 0, tl.sum(square, 1)[:, None] / kept, 1.0))
    new = tl.where(untouched, raw, tl.where(keep, scaled, 0.0).to(raw.dtype))
    tl.store(out_gates + at, new, mask=there)
    tl.store(out_ids + at, tl.where(keep, e, E).to(out_ids.dtype.element_ty), mask=there)
    if PHASED:
        for p in tl.static_range(2):
            _count(counts + 2 * p, there & (phase == p)[:, None], keep)
    elif MASKED:
        _count(counts, there & (tl.load(mask + t) != 0)[:, None], keep)
    else:
        _count(counts, there, keep)


@triton.jit(do_not_specialize=["T"])
def decide(
    ids, gates, first, second, threshold, mask, counts, out_ids, out_gates, T, E,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr, GAIN: tl.constexpr,
    MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr, MASKED: tl.constexpr, PHASED: tl.constexpr = False,
    SQUARED: tl.constexpr = False,
):  # fmt: skip
    """out_ids, out_gates [T, k]: E in place of skipped experts, rescaled gates; counts += (routed, kept)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    j = tl.arange(0, KP)
    there = (t < T)[:, None] & (j < K)[None, :]
    at = t[:, None] * K + j[None, :]
    e = tl.load(ids + at, mask=there, other=2147483647)
    raw = tl.load(gates + at, mask=there, other=0.0)
    settle(
        e, raw, tl.minimum(t, T - 1), there, first, second, threshold, mask, counts, out_ids, out_gates, E,
        K, VIEWS, FUSION, GAIN, MIN_ACTIVE, MIN_MASS, MASKED, PHASED, SQUARED,
    )  # fmt: skip
