"""The online rule as pure tensor functions: which slots run, and with what gates.

This file is the reference: every fast path is tested against it. All shapes are [T, k]: T tokens, k slots each.
Nothing here syncs with the host or has a data-dependent shape, so it runs inside CUDA graphs and torch.compile.

Order of events for one token: contributions → protected slots count as +∞ → a slot is skipped iff its
contribution < τ → kept gates are rescaled. A token that loses nothing gets the router's own gates back.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Gain = Literal["kept", "none", "power"]
Fusion = Literal["max", "min", "mean"]
GAINS: tuple[Gain, ...] = ("kept", "none", "power")
EPSILON = 1e-8


def share(gates: Tensor, amplification: Tensor | None = None, squared: bool = False) -> Tensor:
    """p_i = |g_i| A(e_i) / (Σ_j |g_j| A(e_j) + ε), in fp32; `amplification` [T, k] is the table at the slots' experts.

    `squared`: of g² instead of |g|.
    """
    score = gates.float().square() if squared else gates.float().abs()
    score = score if amplification is None else score * amplification
    return score / (score.sum(-1, keepdim=True) + EPSILON)


def fuse(first: Tensor, second: Tensor, how: Fusion) -> Tensor:
    """One contribution from two views; `max` skips a slot only if both views call it low."""
    if how == "max":
        return torch.maximum(first, second)
    return torch.minimum(first, second) if how == "min" else (first + second) / 2


def top_slot(gates: Tensor, ids: Tensor) -> Tensor:
    """Mask of the slot with the largest gate; ties go to the lower expert id (slot order differs between engines)."""
    best = gates == gates.max(-1, keepdim=True).values
    candidates = torch.where(best, ids, torch.iinfo(ids.dtype).max)
    return best & (candidates == candidates.min(-1, keepdim=True).values)


def rank(contribution: Tensor, ids: Tensor) -> Tensor:
    """0 for the largest contribution, k − 1 for the smallest; ties go to the lower expert id."""
    c, e = contribution, ids
    larger = c.unsqueeze(-2) > c.unsqueeze(-1)
    tie = (c.unsqueeze(-2) == c.unsqueeze(-1)) & (e.unsqueeze(-2) < e.unsqueeze(-1))
    return (larger | tie).sum(-1)


def protect(contribution: Tensor, gates: Tensor, ids: Tensor, min_active: int = 1, min_mass: float = 0.0) -> Tensor:
    """Contributions with +∞ at the slots that may not be skipped, whatever τ is.

    Protected: the top gate; the min_active − 1 largest contributions among the rest; with min_mass > 0, every slot
    at which the gate mass of the others, summed in ascending contribution, would exceed 1 − min_mass of the token's.
    """
    out = contribution.masked_fill(top_slot(gates, ids), torch.inf)
    if min_active > 1:
        out = out.masked_fill(rank(out, ids) < min_active, torch.inf)
    if min_mass > 0:
        order, g = rank(out, ids), gates.float()
        before = order.unsqueeze(-2) >= order.unsqueeze(-1)  # skipped no later than this slot, itself included
        candidate = torch.where(out.isinf(), 0.0, g)
        skipped = (before * candidate.unsqueeze(-2)).sum(-1)
        out = out.masked_fill(skipped > (1.0 - min_mass) * g.sum(-1, keepdim=True), torch.inf)
    return out


def gain_factor(gates: Tensor, keep: Tensor, gain: Gain) -> Tensor:
    """What kept gates are multiplied by, [T, 1], fp32.

    kept: Σ_all g / Σ_I g (the paper)   power: sqrt(Σ_all g² / Σ_I g²)   none: 1
    """
    g = gates.float()
    if gain == "none":
        return torch.ones_like(g[..., :1])
    g = g.square() if gain == "power" else g
    every, kept = g.sum(-1, keepdim=True), torch.where(keep, g, 0.0).sum(-1, keepdim=True)
    factor = torch.where(kept > 0, every / kept, 1.0)
    return factor.sqrt() if gain == "power" else factor


def rescale(gates: Tensor, keep: Tensor, gain: Gain) -> Tensor:
    """Gates of the kept slots, 0 elsewhere, in the router's dtype."""
    scaled = (gates.float() * gain_factor(gates, keep, gain)).to(gates.dtype)
    untouched = keep.all(-1, keepdim=True)
    return torch.where(untouched, gates, torch.where(keep, scaled, torch.zeros_like(gates)))


def decide(protected: Tensor, gates: Tensor, threshold: Tensor | float, gain: Gain) -> tuple[Tensor, Tensor]:
    """(keep mask, gates) from protected contributions."""
    keep = ~(protected < threshold)
    return keep, rescale(gates, keep, gain)
