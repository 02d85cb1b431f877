"""Routing and rule in one kernel: logits in, kept ids and rescaled gates out, for routers that are a plain top-k.

torch's top-k, its sort, the softmax around it and the rule are six launches a layer; at one token each costs more than
its work. One program per token picks the k largest scores one after the other and decides them at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rule_kernel import settle


@triton.jit
def route(
    logits, first, second, threshold, mask, counts, out_ids, out_gates, E, row,
    K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    VIEWS: tl.constexpr, FUSION: tl.constexpr, GAIN: tl.constexpr, MIN_ACTIVE: tl.constexpr, MIN_MASS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (T). Scores are softmax or sigmoid of the logits in fp32; ties go to the lower expert id."""
    t = tl.program_id(0)
    lanes = tl.arange(0, EP)
    z = tl.load(logits + t * row + lanes, mask=lanes < E, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where(lanes < E, tl.sigmoid(z), -1.0)
    else:
        score = tl.exp(z - tl.max(z, 0))
        score = tl.where(lanes < E, score / tl.sum(score, 0), -1.0)
    j = tl.arange(0, KP)
    ids = tl.full((KP,), 2147483647, tl.int32)
    gate = tl.zeros((KP,), tl.float32)
    for slot in tl.static_range(K):
        best = tl.max(score, 0)
        e = tl.min(tl.where(score == best, lanes, EP), 0)
        ids = tl.where(j == slot, e, ids)
        gate = tl.where(j == slot, best, gate)
        score = tl.where(lanes == e, -2.0, score)
    if NORMALISE:
        gate = gate / tl.sum(gate, 0)
    raw = gate.to(out_gates.dtype.element_ty)
    settle(
        ids[None, :], raw[None, :], t + tl.zeros((1,), tl.int32), (j < K)[None, :], first, second, threshold, mask,
        counts, out_ids, out_gates, E, K, VIEWS, FUSION, GAIN, MIN_ACTIVE, MIN_MASS, MASKED,
    )  # fmt: skip
