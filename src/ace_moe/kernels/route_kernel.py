"""Routing and rule in one kernel: logits in, kept ids and rescaled gates out, for routers that are a plain top-k.

torch's top-k, its sort, the softmax around it and the rule are six launches a layer; at one token each costs more than
its work. A program picks the k largest scores of its tokens one after the other, of a single token all at once, and decides
them on the spot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn
from .rule_kernel import row_of, settle


@triton.jit
def _paired(score, j, E, K: tl.constexpr, EP: tl.constexpr):
    """The k best of one token's scores [1, EP], each score's place found by holding it against every other: no loop."""
    mine, lanes = tl.reshape(score, (EP,)), tl.arange(0, EP)
    lower = lanes[None, :] < lanes[:, None]
    before = (mine[None, :] > mine[:, None]) | ((mine[None, :] == mine[:, None]) & lower)
    place = tl.sum(before.to(tl.int32), 1)
    hit = (place[None, :] == j[:, None]) & (j < K)[:, None]
    ids = tl.minimum(tl.min(tl.where(hit, lanes[None, :], EP), 1), E - 1)  # NaN: any expert
    gate = tl.sum(tl.where(hit, mine[None, :], 0.0), 1)
    return tl.where(j < K, ids, -1)[None, :], gate[None, :]


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["rows"])  # one build for any part of any batch
def route(
    logits, rows, tau, first, second, factor, counts, free, reads, out_ids, out_gates, T, E, stride, MARK,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    PAIRED: tl.constexpr, VOTE: tl.constexpr, VIEWS: tl.constexpr, FUSION: tl.constexpr, POWER: tl.constexpr,
    NORM: tl.constexpr, CUMULATIVE: tl.constexpr, FACTOR: tl.constexpr, GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr,
    MIN_MASS: tl.constexpr, CODED: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (tiles of T). Scores are softmax or sigmoid of the logits in fp32; ties go to the lower expert id."""
    take_turn(EARLY)
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
    if PAIRED:
        ids, gate = _paired(score, j, E, K, EP)
    else:
        ids = tl.full((BT, KP), -1, tl.int32)
        gate = tl.zeros((BT, KP), tl.float32)
        for slot in tl.static_range(K):
            best = tl.max(score, 1)
            e = tl.minimum(tl.min(tl.where(score == best[:, None], lanes[None, :], EP), 1), E - 1)  # NaN: any expert
            ids = tl.where(j[None, :] == slot, e[:, None], ids)
            gate = tl.where(j[None, :] == slot, best[:, None], gate)
            score = tl.where(lanes[None, :] == e[:, None], -2.0, score)
    if NORMALISE:
        gate = gate / tl.sum(gate, 1)[:, None]
    slots = (t < T)[:, None] & (j < K)[None, :]
    settle(
        ids, gate.to(out_gates.dtype.element_ty), t, slots, row, threshold, first, second, factor, counts, free, reads,
        out_ids, out_gates, MARK, K, VOTE, VIEWS, FUSION, POWER, NORM, CUMULATIVE, FACTOR, GAIN, MIN_ACTIVE, MIN_MASS, CODED,
    )  # fmt: skip
