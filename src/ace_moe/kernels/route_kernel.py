"""Routing and rule in one kernel: logits in, kept ids and rescaled gates out, for routers that take the k largest scores.

torch's top-k, its sort, the softmax around it and the rule are six launches a layer; at one token each costs more than
its work. A program picks the k largest scores of its tokens one after the other and decides them at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rule_kernel import row_of, settle


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows"])  # one build for any part of any batch
def route(
    logits, bias, scale, rows, tau, first, second, factor, counts, free, reads, out_ids, out_gates, T, E, stride, MARK,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, TIMES: tl.constexpr,
    VOTE: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr, POWER: tl.constexpr,
    NORM: tl.constexpr, CUMULATIVE: tl.constexpr, FACTOR: tl.constexpr, GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr,
    MIN_MASS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (tiles of T). Scores are softmax or sigmoid of the logits in fp32; ties go to the lower expert id.

    BIAS: experts are chosen by score + bias [E]. Gates are their scores, NORMALISEd, times scale [E] (SCALE) and TIMES.
    """
    if EARLY:  # the experts' programs wait by themselves
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    row, threshold = row_of(rows, tau, t, T)
    lanes = tl.arange(0, EP)
    real = (t < T)[:, None] & (lanes < E)[None, :]
    at = t.to(tl.int64)[:, None] * stride + lanes[None, :]
    z = tl.load(logits + at, mask=real, other=-float("inf")).to(tl.float32)
    if SIGMOID:  # lanes past the last expert score 0: among equals the lower lane goes first
        score = tl.sigmoid(z)
    else:
        score = tl.exp(z - tl.max(z, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    j = tl.arange(0, KP)
    ids = tl.full((BT, KP), -1, tl.int32)
    gate = tl.zeros((BT, KP), tl.float32)
    # Scores are not negative, so their bits are in their order; and of integers a warp finds the largest in one instruction
    key = score.to(tl.int32, bitcast=True)
    if BIAS:
        moved = score + tl.load(bias + lanes, mask=lanes < E, other=-float("inf")).to(tl.float32)[None, :]
        key = moved.to(tl.int32, bitcast=True)
        key = key ^ ((key >> 31) & 0x7FFFFFFF)  # a negative number's bits are in the other order
    # No threshold is negative; but for this it would be fetched, and waited for, where it is compared
    key = tl.where(threshold < 0, 0, key)
    for slot in tl.static_range(K):
        best = tl.max(key, 1)
        e = tl.min(tl.where(key == best[:, None], lanes[None, :], E - 1), 1)
        here = lanes[None, :] == e[:, None]
        own = tl.sum(tl.where(here, score, 0.0), 1) if BIAS else best.to(tl.float32, bitcast=True)
        ids = tl.where(j[None, :] == slot, e[:, None], ids)
        gate = tl.where(j[None, :] == slot, own[:, None], gate)
        key = tl.where(here, -2147483648, key)
    if NORMALISE:
        gate = gate / tl.sum(gate, 1)[:, None]
    if SCALE:
        gate *= tl.load(scale + ids, mask=ids >= 0, other=0.0).to(tl.float32)
    if TIMES != 1.0:
        gate *= TIMES
    slots = (t < T)[:, None] & (j < K)[None, :]
    settle(
        ids, gate.to(out_gates.dtype.element_ty), t, slots, row, threshold, first, second, factor, counts, free, reads,
        out_ids, out_gates, MARK, K, VOTE, VIEWS, FUSION, POWER, NORM, CUMULATIVE, FACTOR, GAIN, MIN_ACTIVE, MIN_MASS,
    )  # fmt: skip
