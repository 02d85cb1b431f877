"""Routing and rule in one kernel: logits in, kept ids and rescaled gates out, for routers that are a plain top-k.

torch's top-k, its sort, the softmax around it and the rule are six launches a layer; at one token each costs more than
its work. A program picks the k largest scores of its tokens one after the other and decides them at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import take_turn
from .rule_kernel import settle


@triton.jit(do_not_specialize=["T"])  # one build for any number of tokens
def route(
    logits, first, second, threshold, mask, counts, out_ids, out_gates, T, E, row,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    VIEWS: tl.constexpr, FUSION: tl.constexpr, GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr,
    MASKED: tl.constexpr, PHASED: tl.constexpr = False, SQUARED: tl.constexpr = False, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Grid (tiles of T). Scores are softmax or sigmoid of the logits in fp32; ties go to the lower expert id.

    PHASED as in `settle`; skipped slots then get the id −1, as vLLM writes it, instead of E.
    """
    take_turn(EARLY)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    lanes = tl.arange(0, EP)
    real = (t < T)[:, None] & (lanes < E)[None, :]
    z = tl.load(logits + t.to(tl.int64)[:, None] * row + lanes[None, :], mask=real, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where((lanes < E)[None, :], tl.sigmoid(z), -1.0)
    else:
        score = tl.exp(z - tl.max(z, 1)[:, None])
        score = tl.where((lanes < E)[None, :], score / tl.sum(score, 1)[:, None], -1.0)
    score = tl.where(real, score, -1.0)
    j = tl.arange(0, KP)
    ids = tl.full((BT, KP), 2147483647, tl.int32)
    gate = tl.zeros((BT, KP), tl.float32)
    for slot in tl.static_range(K):
        best = tl.max(score, 1)
        e = tl.minimum(tl.min(tl.where(score == best[:, None], lanes[None, :], EP), 1), E - 1)  # NaN: any expert
        ids = tl.where(j[None, :] == slot, e[:, None], ids)
        gate = tl.where(j[None, :] == slot, best[:, None], gate)
        score = tl.where(lanes[None, :] == e[:, None], -2.0, score)
    if NORMALISE:
        gate = gate / tl.sum(gate, 1)[:, None]
    there = (t < T)[:, None] & (j < K)[None, :]
    settle(
        ids, gate.to(out_gates.dtype.element_ty), tl.minimum(t, T - 1), there, first, second, threshold, mask,
        counts, out_ids, out_gates, -1 if PHASED else E, K, VIEWS, FUSION, GAIN, MIN_ACTIVE, MIN_MASS, MASKED, PHASED,
        SQUARED,
    )  # fmt: skip
