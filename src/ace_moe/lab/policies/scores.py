"""What the router thinks of every expert, also of those it did not choose: scores [T, E] and re-selection by them.

Routers differ in how logits become gates (softmax, sigmoid, …) and models do not say which. The gates do: the function
whose values at the routed experts are proportional to their gates is the router's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda z: z.softmax(-1),
    lambda z: z.sigmoid(),
    lambda z: F.softplus(z).sqrt(),
)
CLEARLY = 0.5  # softmax unless another function fits the gates twice as well: where they agree noise would choose
DISTRIBUTION = 1e-2  # a row that is nowhere negative and sums to 1 within this is a softmax already (Gemma-4)


def scores(logits: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """The router's own score of every expert, [T, E] in fp32; a token's gates are a multiple of its scores."""
    z = logits.float()
    found = ACTIVATIONS[0](z)
    best = _misfit(found, ids, gates) * CLEARLY
    for activation in ACTIVATIONS[1:]:
        other = activation(z)
        misfit = _misfit(other, ids, gates)
        found = torch.where(misfit < best, other, found)
        best = torch.minimum(misfit, best)
    ready = (z >= 0).all(-1, keepdim=True) & ((z.sum(-1, keepdim=True) - 1).abs() < DISTRIBUTION)
    return torch.where(ready, z, found)


def _misfit(candidate: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """How far gates are from being a multiple of the candidate's values, [T, 1]: spread of their ratio."""
    ratio = gates.float() / candidate.gather(-1, ids).clamp(min=1e-30)
    mean = ratio.mean(-1, keepdim=True)
    return (ratio - mean).abs().mean(-1, keepdim=True) / mean.abs().clamp(min=1e-30)


def reselect(score: Tensor, ids: Tensor, gates: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k inside allowed [T or 1, E]: ids, gates before any gain, keep, each [T, k].

    Routed experts that are allowed stay in their slots; each other slot takes the best allowed expert that is left, with
    the gate the router would give it on the scale of this token's gates. Slots stay empty where too few are allowed.
    """
    allowed = allowed.expand_as(score)
    free = score.masked_fill(~allowed, -torch.inf).scatter(-1, ids, -torch.inf)
    value, other = free.topk(ids.shape[-1], dim=-1)
    stays = allowed.gather(-1, ids)
    place = ((~stays).cumsum(-1) - 1).clamp(min=0)  # the n-th slot to fill takes the n-th best
    value, other = value.gather(-1, place), other.gather(-1, place)
    scale = gates.float().sum(-1, keepdim=True) / score.gather(-1, ids).sum(-1, keepdim=True).clamp(min=1e-30)
    keep = stays | value.isfinite()
    filled = torch.where(stays, gates.float(), torch.where(keep, value * scale, 0.0))
    return torch.where(stays | ~keep, ids, other), filled, keep
