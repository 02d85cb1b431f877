"""The online rule as pure tensor functions: which slots run, and with what gates.

This file is the reference: every fast path is tested against it. All shapes are [T, k]: T tokens, k slots each.
Nothing here syncs with the host or has a data-dependent shape, so it runs inside CUDA graphs and torch.compile.

Order of events for one token: contributions → protected slots count as +∞ → a slot is skipped iff its
contribution < τ → if asked for, slots whose expert is read anyway are restored → kept gates are rescaled. A token that
loses nothing gets the router's own gates back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gain = str  # one of GAINS; else a constant: a number as text, or the name of a table with one number a layer
Fusion = Literal["max", "min", "mean"]
Norm = Literal["sum", "max", "rank"]
GAINS: tuple[Gain, ...] = ("kept", "none", "power")
CONSTANT = "constant"
FUSIONS: tuple[Fusion, ...] = ("max", "min", "mean")
NORMS: tuple[Norm, ...] = ("sum", "max", "rank")
EPSILON = 1e-8


@dataclass(frozen=True)
class Form:
    """A contribution written down, so that torch and the kernels compute the same thing.

    A view is |g|^power · A[e], divided by its sum or its maximum over the token's slots; `rank` is 1 − place / k by |g|
    instead. Views of several tables are fused. `cumulative` is 1 − the sum of the shares with larger |g|. `factor` names
    a table with one number a layer that everything is multiplied by.
    """

    tables: tuple[str, ...] = ()
    fusion: Fusion = "max"
    power: Literal[1, 2] = 1
    norm: Norm = "sum"
    cumulative: bool = False
    factor: str | None = None


def contribution(form: Form, gates: Tensor, ids: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
    """What each slot contributes by this form, [T, k] in fp32; ids under 0 are no slot and harm nothing."""
    views = [_view(form, gates, ids, tables[name]) for name in form.tables] or [_view(form, gates, ids)]
    c = views[0]
    for other in views[1:]:
        c = FUSE[form.fusion](c, other)
    if form.cumulative:
        c = residual(c, gates, ids)
    return c if form.factor is None else c * tables[form.factor]


def _view(form: Form, gates: Tensor, ids: Tensor, table: Tensor | None = None) -> Tensor:
    if form.norm == "rank":
        k = ids.shape[-1]
        return (k - rank(gates.float().abs(), ids)).float() / k
    amplification = None if table is None else table[ids.clamp(min=0)]
    if form.norm == "max":
        return to_largest(score(gates, amplification, form.power == 2))
    return share(gates, amplification, form.power == 2)


def score(gates: Tensor, amplification: Tensor | None = None, squared: bool = False) -> Tensor:
    """|g_i| A(e_i), or g_i² A(e_i), in fp32; `amplification` [T, k] is the table at the slots' experts."""
    size = gates.float().square() if squared else gates.float().abs()
    return size if amplification is None else size * amplification


def share(gates: Tensor, amplification: Tensor | None = None, squared: bool = False) -> Tensor:
    """p_i = s_i / (Σ_j s_j + ε) of the scores s."""
    s = score(gates, amplification, squared)
    return s / (s.sum(-1, keepdim=True) + EPSILON)


def to_largest(s: Tensor) -> Tensor:
    """s_i / max_j s_j of each token, [T, k]; the largest is exactly 1."""
    return s / s.max(-1, keepdim=True).values.clamp(min=EPSILON)


def residual(shares: Tensor, gates: Tensor, ids: Tensor) -> Tensor:
    """1 − Σ of the shares of slots with a larger gate, in [0, 1]."""
    order = rank(gates.float().abs(), ids)
    before = order.unsqueeze(-2) < order.unsqueeze(-1)
    # the sum may pass 1 by a rounding; a negative residual would be skipped at τ = 0
    return (1 - torch.where(before, shares.unsqueeze(-2), 0.0).sum(-1)).clamp(0, 1)


# One contribution from two views; `max` skips a slot only if both views call it low.
FUSE: dict[Fusion, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum, "min": torch.minimum, "mean": lambda first, second: (first + second) / 2,
}  # fmt: skip


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


def weigh(protected: Tensor, factor: Tensor) -> Tensor:
    """Protected contributions times a layer's factor; an infinite factor guards the layer: none of its slots is skipped.

    By selection, not by multiplying: 0 · ∞ is no number.
    """
    return torch.where(factor.isinf(), torch.inf, protected * factor)


def gain_factor(before: Tensor, after: Tensor, gain: Gain, constant: Tensor | None = None) -> Tensor:
    """What the gates `after` skipping (0 where nothing runs) are multiplied by, [T, 1], fp32; g are those `before`.

    kept: Σ_all g / Σ_I g (the paper)   power: sqrt(Σ_all g² / Σ_I g²)   none: 1   otherwise `constant` [], or the number
    """
    one = torch.ones_like(before[..., :1], dtype=torch.float32)
    if gain not in GAINS:
        return one * (float(gain) if constant is None else constant)
    if gain == "none":
        return one
    squared = gain == "power"
    every, kept = ((g.float().square() if squared else g.float()).sum(-1, keepdim=True) for g in (before, after))
    factor = torch.where(kept > 0, every / kept, 1.0)
    return factor.sqrt() if squared else factor


def rescale(gates: Tensor, keep: Tensor, gain: Gain, constant: Tensor | None = None) -> Tensor:
    """Gates of the kept slots, 0 elsewhere, in the router's dtype."""
    zero, untouched = torch.zeros_like(gates), keep.all(-1, keepdim=True)
    scaled = (gates.float() * gain_factor(gates, torch.where(keep, gates, zero), gain, constant)).to(gates.dtype)
    return torch.where(untouched, gates, torch.where(keep, scaled, zero))


def union(ids: Tensor, slots: Tensor, experts: int) -> Tensor:
    """[E] bool: the experts of the slots [T, k] that are marked."""
    at = torch.where(slots, ids, experts).flatten().long()
    found = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
    return found.scatter(0, at, torch.ones_like(at, dtype=torch.bool))[:experts]


def restore(keep: Tensor, ids: Tensor, read: Tensor, free: Tensor) -> Tensor:
    """keep [T, k] and the other slots of the tokens `free` [T] whose expert is read [E] anyway: they cost no read."""
    there = (ids >= 0) & (ids < len(read))
    return keep | (free.unsqueeze(-1) & there & read[torch.where(there, ids, 0).long()])


def kept(protected: Tensor, threshold: Tensor | float) -> Tensor:
    """[T, k]: a slot is skipped iff it lies under τ, so what is no number is kept."""
    return ~(protected < threshold)


def decide(protected: Tensor, gates: Tensor, threshold: Tensor | float, gain: Gain) -> tuple[Tensor, Tensor]:
    """(keep mask, gates) from protected contributions."""
    keep = kept(protected, threshold)
    return keep, rescale(gates, keep, gain)
