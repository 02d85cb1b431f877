"""Policies by which the tokens of a batch share a subset of the experts, and how a pass is cut into groups of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import rule
from ...errors import PolicyError
from ...policies import Routing
from ...rule import Gain
from .base import context, logits_of
from .scores import scores
from .subset import SubsetPolicy


@dataclass(frozen=True, kw_only=True)
class BatchPolicy(SubsetPolicy):
    """One subset for `group` consecutive tokens; 0 takes the whole pass, as these methods do for a decoding batch."""

    limits = (
        SubsetPolicy.limits + "; a pass of many tokens also needs nearly all experts, and group=16 decides as "
        "a decoding batch of 16 would"
    )

    group: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)


@dataclass(frozen=True, kw_only=True)
class Oea(BatchPolicy):
    """Phase 1: S_base = union over the batch of each token's top k0 = ⌈k (1 − τ)⌉; phase 2: each token walks its ranking
    and adds experts of S_base until it has k. Gates are renormalised over the final set.

    (Opportunistic Expert Activation, 2025, in its best setting: k_max = k, unlimited rank.) k0 is at least min_active.
    """

    name = "oea"

    gain: Gain = "kept"

    def allowed(self, routing: Routing) -> Tensor:
        k = routing.ids.shape[-1]
        base = (k - (routing.threshold * k).floor()).clamp(min=min(self.min_active, k))
        first = rule.rank(routing.gates.float().abs(), routing.ids) < base
        return group_sum(marked(routing.ids, first, context(routing).experts), routing, self.group) > 0


@dataclass(frozen=True, kw_only=True)
class XShare(BatchPolicy):
    """Per layer and batch: E0 = every token's top expert, then experts of the largest Σ_t p_te until ⌈E (1 − τ)⌉.

    (XShare, 2026.) Each token re-selects its top-k inside the subset. p [T, E] is the router's probability.
    """

    name = "xshare"
    with_top: ClassVar[bool] = True

    gain: Gain = "kept"

    def allowed(self, routing: Routing) -> Tensor:
        utility = group_sum(scores(logits_of(routing), routing.ids, routing.gates), routing, self.group)
        if self.with_top:  # E0 counts towards the size, and stays where it alone is larger
            top = marked(routing.ids, rule.top_slot(routing.gates, routing.ids), utility.shape[-1])
            utility = utility.masked_fill(group_sum(top, routing, self.group) > 0, torch.inf)
        place = utility.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        size = utility.shape[-1] - (routing.threshold * utility.shape[-1]).floor()
        return (place < (size.clamp(min=self.min_active) if self.refill else size)) | utility.isinf()


def check_group(group: object) -> None:
    if not isinstance(group, int) or group < 0:
        raise PolicyError(f"group is a number of tokens, or 0 for the whole pass; not {group!r}.")


def group_sum(values: Tensor, routing: Routing, group: int) -> Tensor:
    """values [T, n] summed over each token's group, padding left out, given back to each token: [T, n]."""
    if routing.token_mask is not None:
        values = values * routing.token_mask.unsqueeze(-1)
    size = group or max(len(values), 1)
    index = torch.arange(len(values), device=values.device) // size
    return values.new_zeros(-(-len(values) // size), values.shape[-1]).index_add(0, index, values)[index]


def marked(ids: Tensor, mark: Tensor, experts: int) -> Tensor:
    """[T, E]: 1 at the experts of the slots in `mark` [T, k]; of a step's slots in one row: the experts it reads."""
    return torch.zeros(len(ids), experts, device=ids.device).scatter_add(-1, ids, mark.float()).clamp(max=1)
