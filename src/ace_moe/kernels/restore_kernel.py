"""The decider's second half: a skipped slot whose expert is read anyway runs after all, and gates are rescaled behind it.

An expert is read if any token of the step keeps it, padding aside. Rows with `free` [R] set get such slots back, so no
expert is read that the rule alone would not read, and a token runs at least what it would run alone. `reads` [2, 2] grows
by the experts read and the experts the router asked for: first in steps of generated tokens, then in those with prompts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn


@triton.jit
def present(e, slots, EP: tl.constexpr):
    """[2 EP]: more than 0 for experts of the marked slots [n, k]; what is no slot falls behind EP."""
    return tl.histogram(tl.reshape(tl.where(slots, e, EP), (e.shape[0] * e.shape[1],)), 2 * EP)


@triton.jit
def add_reads(reads, read, asked, prompt):
    tl.atomic_add(reads + 2 * prompt, read, sem="relaxed")
    tl.atomic_add(reads + 2 * prompt + 1, asked, sem="relaxed")


@triton.jit
def count_reads(reads, kept, routed, prompt, EP: tl.constexpr):
    """reads [2, 2] += experts read, experts asked for; `prompt`: 1 if a token of the step is a prompt's."""
    expert = tl.arange(0, 2 * EP) < EP
    read = tl.sum((expert & (kept > 0)).to(tl.int64), 0)
    add_reads(reads, read, tl.sum((expert & (routed > 0)).to(tl.int64), 0), prompt)


@triton.jit
def restored(there, keep, read, row, free, counts):
    """keep [n, k] and the slots of free rows whose expert is read; counts [R, 3] += restored slots."""
    back = there & (keep == 0) & (tl.load(free + row) > 0)[:, None] & read
    number = tl.sum(back.to(tl.int32), 1)
    tl.atomic_add(counts + 3 * row + 2, number.to(tl.int64), mask=number > 0, sem="relaxed")
    return keep | back


@triton.jit
def rescaled(raw, gate, there, keep, factor, GAIN: tl.constexpr):
    """Gates [n, k] of the kept slots, 0 elsewhere; of a token that lost nothing the router's own. `gate` is raw in fp32."""
    scaled = gate
    if GAIN == 0:
        kept = tl.sum(tl.where(keep, gate, 0.0), 1)[:, None]
        scaled = gate * tl.where(kept > 0, tl.sum(gate, 1)[:, None] / kept, 1.0)
    elif GAIN == 2:
        square = gate * gate
        kept = tl.sum(tl.where(keep, square, 0.0), 1)[:, None]
        scaled = gate * tl.sqrt_rn(tl.where(kept > 0, tl.sum(square, 1)[:, None] / kept, 1.0))
    elif GAIN == 3:
        scaled = gate * tl.load(factor + 2)
    own = (tl.sum((there & (keep == 0)).to(tl.int32), 1)[:, None] == 0) & there
    return tl.where(own, raw, tl.where(keep, scaled, 0.0).to(raw.dtype))


@triton.jit
def _decoded(coded):
    """(expert, whether there is a slot, whether the rule keeps it) of what the first half wrote."""
    return tl.where(coded < -1, -2 - coded, coded), coded != -1, coded >= 0


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows"])
def vote(ids, rows, votes, T, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    """votes [2, EP] ← 1 for experts kept and experts routed, votes[2 EP] ← 1 if there is a prompt's token. Grid (tiles of T)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    j = tl.arange(0, KP)
    coded = tl.load(ids + t[:, None] * K + j[None, :], mask=(t < T)[:, None] & (j < K)[None, :], other=-1).to(tl.int32)
    e, there, keep = _decoded(coded)
    one = tl.full((BT, KP), 1, tl.int32)
    tl.store(votes + e, one, mask=keep)  # many may write, all the same
    tl.store(votes + EP + e, one, mask=there)
    row = tl.load(rows + t, mask=t < T, other=0).to(tl.int32)
    tl.store(votes + 2 * EP + t * 0, tl.full((BT,), 1, tl.int32), mask=(row > 0) & (row % 3 == 1))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows"])
def restore(
    ids, gates, rows, factor, free, votes, counts, reads, out_ids, out_gates, T, MARK,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, TP: tl.constexpr, GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out_ids, out_gates [T, k] from the first half's. Grid (tiles of T).

    Up to TP tokens every program looks at all slots by itself; with TP = 0 they were counted in `votes` before.
    """
    take_turn(EARLY)
    j = tl.arange(0, KP)
    lanes = tl.arange(0, 2 * EP)
    if TP > 0:
        u = tl.arange(0, TP)
        others = (u < T)[:, None] & (j < K)[None, :]
        e, there, keep = _decoded(tl.load(ids + u[:, None] * K + j[None, :], mask=others, other=-1).to(tl.int32))
        kept = present(e, keep, EP)
        if tl.program_id(0) == 0:
            row = tl.load(rows + u, mask=u < T, other=0).to(tl.int32)
            prompt = tl.max(((row > 0) & (row % 3 == 1)).to(tl.int32), 0)
            count_reads(reads, kept, present(e, there, EP), prompt, EP)
    else:
        kept = tl.load(votes + lanes, mask=lanes < EP, other=0)
        if tl.program_id(0) == 0:
            routed = tl.load(votes + EP + lanes, mask=lanes < EP, other=0)
            count_reads(reads, kept, routed, tl.load(votes + 2 * EP), EP)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    slots = (t < T)[:, None] & (j < K)[None, :]
    at = t[:, None] * K + j[None, :]
    e, there, keep = _decoded(tl.load(ids + at, mask=slots, other=-1).to(tl.int32))
    raw = tl.load(gates + at, mask=slots, other=0.0)
    row = tl.load(rows + t, mask=t < T, other=0).to(tl.int32)
    at_expert = tl.gather(kept, tl.reshape(tl.where(there, e, 0), (BT * KP,)), 0)
    keep = restored(there, keep, tl.reshape(at_expert, (BT, KP)) > 0, row, free, counts)
    gate = tl.where(there, raw.to(tl.float32), 0.0)
    tl.store(out_gates + at, rescaled(raw, gate, there, keep, factor, GAIN), mask=slots)
    tl.store(out_ids + at, tl.where(keep, e, MARK).to(out_ids.dtype.element_ty), mask=slots)
