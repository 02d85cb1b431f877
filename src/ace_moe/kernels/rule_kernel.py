"""The rule as one Triton kernel: the same decisions as `rule.py`, to which tests tie it, in one launch.

Constants of a form: VIEWS tables (0: the gate alone), FUSION 0 max, 1 min, 2 mean; POWER of |g|; NORM 0 sum, 1 max,
2 rank; CUMULATIVE; FACTOR: `factor` [3] holds what contributions are multiplied by before and after protection, and what
kept gates are under GAIN 3; GAIN 0 kept, 1 none, 2 power.
VOTE 0: every token by itself; 1: this program has all tokens of the step and restores slots; 2: a second launch will
(`restore_kernel.py`), for which a skipped slot stays known as −2 − e, with its raw gate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .restore_kernel import add_reads, rescaled, restored


@triton.jit
def _ahead(c, ids):
    """[BT, KP, KP]: whether slot j (last) stands before slot i by c; equal values go to the lower expert id."""
    mine, other = c[:, :, None], c[:, None, :]
    return (other > mine) | ((other == mine) & (ids[:, None, :] < ids[:, :, None]))


@triton.jit
def _rank(c, ids):
    """0 for the largest of a token's values."""
    return tl.sum(_ahead(c, ids).to(tl.int32), 2)


@triton.jit
def _divided(score, NORM: tl.constexpr):
    """Scores [BT, KP] over their sum, or over the largest, whose own must be 1 to the last bit."""
    if NORM == 1:
        return tl.div_rn(score, tl.maximum(tl.max(score, 1), 1e-8)[:, None])
    return score / (tl.sum(score, 1)[:, None] + 1e-8)


@triton.jit
def _amplified(size, table, e, there):
    """Sizes [BT, KP] times the table at the slots' experts; nothing is read where there is no slot."""
    return size * tl.load(table + e, mask=there, other=0.0)


@triton.jit
def _fused(c, other, FUSION: tl.constexpr):
    if FUSION == 0:
        return tl.maximum(c, other)
    elif FUSION == 1:
        return tl.minimum(c, other)
    return (c + other) * 0.5


@triton.jit
def _contribution(
    gate, e, there, first, second, factor, K: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr,
    POWER: tl.constexpr, NORM: tl.constexpr, CUMULATIVE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """c [BT, KP] by the form; gates are 0 where there is no slot."""
    place = tl.where(there, tl.abs(gate), -1.0)  # what is no slot stands behind all that are
    if NORM == 2:
        c = tl.div_rn((K - _rank(place, e)).to(tl.float32), 1.0 * K)  # τ may be one of these values exactly
    else:
        size = gate * gate if POWER == 2 else tl.abs(gate)
        c = _divided(_amplified(size, first, e, there) if VIEWS > 0 else size, NORM)
        if VIEWS == 2:
            c = _fused(c, _divided(_amplified(size, second, e, there), NORM), FUSION)
    if CUMULATIVE:
        larger = _ahead(place, e) & there[:, None, :]
        c = 1 - tl.sum(tl.where(larger, c[:, None, :], 0.0), 2)
        c = tl.minimum(tl.maximum(c, 0.0), 1.0)
    if FACTOR:
        c = c * tl.load(factor)
    return c


@triton.jit
def _protected(c, gate, e, there, MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr):
    """+∞ at the slots the safeguards keep, −∞ where there is no slot."""
    best = there & (gate == tl.max(tl.where(there, gate, -float("inf")), 1)[:, None])
    lowest = tl.min(tl.where(best, e, 2147483647), 1)[:, None]
    c = tl.where(best & (e == lowest), float("inf"), tl.where(there, c, -float("inf")))
    if MIN_ACTIVE > 1:
        c = tl.where(there & (_rank(c, e) < MIN_ACTIVE), float("inf"), c)
    if MIN_MASS > 0:
        # what is skipped no later than this slot, itself included; protected slots are ahead of all that are not
        skipped = tl.sum(tl.where(_ahead(c, e), 0.0, gate[:, None, :]), 2)
        c = tl.where(there & (skipped > (1.0 - MIN_MASS) * tl.sum(gate, 1)[:, None]), float("inf"), c)
    return c


@triton.jit
def _count(counts, row, there, keep):
    """counts [R, 3] += routed, kept by the rule; once for a program whose tokens share a row, which is nearly always."""
    routed, kept = tl.sum(there.to(tl.int32), 1), tl.sum(keep.to(tl.int32), 1)
    top = tl.max(row, 0)
    if tl.sum(((routed > 0) & (row != top)).to(tl.int32), 0) == 0:
        tl.atomic_add(counts + 3 * top, tl.sum(routed, 0).to(tl.int64), mask=top > 0, sem="relaxed")
        tl.atomic_add(counts + 3 * top + 1, tl.sum(kept, 0).to(tl.int64), mask=top > 0, sem="relaxed")
    else:
        tl.atomic_add(counts + 3 * row, routed.to(tl.int64), mask=row > 0, sem="relaxed")
        tl.atomic_add(counts + 3 * row + 1, kept.to(tl.int64), mask=row > 0, sem="relaxed")


@triton.jit
def _free(e, there, keep, row, free, counts, reads):
    """keep [BT, KP] with the slots whose expert another token of this program keeps; reads are counted."""
    size: tl.constexpr = e.shape[0] * e.shape[1]
    expert, kept, routed = tl.reshape(e, (size,)), tl.reshape(keep, (size,)), tl.reshape(there, (size,))
    same = expert[:, None] == expert[None, :]  # [slots, slots]: few enough to look at all pairs
    lane = tl.arange(0, size)
    earlier = same & (lane[None, :] < lane[:, None])
    read = tl.sum((kept & (tl.max((earlier & kept[None, :]).to(tl.int32), 1) == 0)).to(tl.int64), 0)
    asked = tl.sum((routed & (tl.max((earlier & routed[None, :]).to(tl.int32), 1) == 0)).to(tl.int64), 0)
    add_reads(reads, read, asked, tl.max(((row > 0) & (row % 3 == 1)).to(tl.int32), 0))
    if e.shape[0] > 1:
        by_another = tl.reshape(tl.max((same & kept[None, :]).to(tl.int32), 1), (e.shape[0], e.shape[1])) > 0
        keep = restored(there, keep, by_another, row, free, counts)
    return keep


@triton.jit
def row_of(rows, tau, t, T):
    """(row [BT], τ [BT, 1]) of tokens t; 0, padding, for those past the last."""
    row = tl.load(rows + t, mask=t < T, other=0).to(tl.int32)
    return row, tl.load(tau + row)[:, None]


@triton.jit
def settle(
    e, raw, t, slots, row, tau, first, second, factor, counts, free, reads, out_ids, out_gates, MARK,
    K: tl.constexpr, VOTE: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr,
    POWER: tl.constexpr, NORM: tl.constexpr, CUMULATIVE: tl.constexpr, FACTOR: tl.constexpr, GAIN: tl.constexpr,
    MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr,
):  # fmt: skip
    """Decide the slots of tokens t [BT]: ids e (int32) and gates raw [BT, KP], `slots` where one is stored.

    Tokens of row 0 are padding: none of their slots runs, and none is counted. A skipped slot gets the id MARK.
    """
    at = t[:, None] * K + tl.arange(0, e.shape[1])[None, :]
    there = slots & (row > 0)[:, None] & (e >= 0)
    gate = tl.where(there, raw.to(tl.float32), 0.0)
    c = _contribution(gate, e, there, first, second, factor, K, VIEWS, FUSION, POWER, NORM, CUMULATIVE, FACTOR)
    c = _protected(c, gate, e, there, MIN_ACTIVE, MIN_MASS)
    if FACTOR:
        weight = tl.load(factor + 1)
        c = tl.where(weight == float("inf"), weight, c * weight)
    keep = there & ((c < tau) == 0)  # not c ≥ τ: what is no number is kept, as in `rule.py`
    _count(counts, row, there, keep)
    if VOTE == 2:
        tl.store(out_gates + at, raw, mask=slots)
        coded = tl.where(there, tl.where(keep, e, -2 - e), -1)
        tl.store(out_ids + at, coded.to(out_ids.dtype.element_ty), mask=slots)
    else:
        if VOTE == 1:
            keep = _free(e, there, keep, row, free, counts, reads)
        tl.store(out_gates + at, rescaled(raw, gate, there, keep, factor, GAIN), mask=slots)
        tl.store(out_ids + at, tl.where(keep, e, MARK).to(out_ids.dtype.element_ty), mask=slots)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows"])  # one build for any part of any batch
def decide(
    ids, gates, rows, tau, first, second, factor, counts, free, reads, out_ids, out_gates, T, MARK,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, VOTE: tl.constexpr, VIEWS: tl.constexpr,
    FUSION: tl.constexpr, POWER: tl.constexpr, NORM: tl.constexpr, CUMULATIVE: tl.constexpr, FACTOR: tl.constexpr,
    GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr,
):  # fmt: skip
    """out_ids, out_gates [T, k]: MARK in place of skipped experts, rescaled gates; counts [R, 3] += routed, kept."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    j = tl.arange(0, KP)
    slots = (t < T)[:, None] & (j < K)[None, :]
    at = t[:, None] * K + j[None, :]
    row, threshold = row_of(rows, tau, t, T)
    e = tl.load(ids + at, mask=slots, other=-1).to(tl.int32)
    raw = tl.load(gates + at, mask=slots, other=0.0)
    settle(
        e, raw, t, slots, row, threshold, first, second, factor, counts, free, reads, out_ids, out_gates, MARK,
        K, VOTE, VIEWS, FUSION, POWER, NORM, CUMULATIVE, FACTOR, GAIN, MIN_ACTIVE, MIN_MASS,
    )  # fmt: skip
