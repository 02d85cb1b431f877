"""XShare: the tokens of a batch share a subset of the experts and choose inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import rule
from ..rule import Gain
from .base import Routing
from .scores import scores
from .subset import BatchPolicy, group_sum, marked


@dataclass(frozen=True, kw_only=True)
class XShare(BatchPolicy):
    """Per layer and batch: E0 = every token's top expert, then experts of the largest Σ_t p_te until ⌈E (1 − τ)⌉.

    (XShare, 2026.) Each token re-selects its top-k inside the subset. p [T, E] is the router's probability.
    """

    name: ClassVar[str] = "xshare"
    with_top: ClassVar[bool] = True

    gain: Gain = "kept"

    def allowed(self, routing: Routing) -> Tensor:
        utility = group_sum(scores(routing), routing, self.group)
        if self.with_top:  # E0 counts towards the size, and stays where it alone is larger
            top = marked(routing.ids, rule.top_slot(routing.gates, routing.ids), utility.shape[-1])
            utility = utility.masked_fill(group_sum(top, routing, self.group) > 0, torch.inf)
        place = utility.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return (place < self._size(routing)) | utility.isinf()

    def _size(self, routing: Routing) -> Tensor:
        assert routing.logits is not None
        experts = routing.logits.shape[-1]
        size = experts - (routing.threshold * experts).floor()
        return size.clamp(min=self.min_active) if self.refill else size


@dataclass(frozen=True, kw_only=True)
class XShareAsCompared(XShare):
    """What the ACE paper's release ran as XShare: keep a slot iff its expert is among the ⌈E (1 − τ)⌉ of most demand in
    the pass, or it is the top slot; no re-selection, kept gates renormalised.
    """

    name: ClassVar[str] = "xshare:ace-paper"
    with_top: ClassVar[bool] = False
    limits: ClassVar[str] = "experts of the pass go one by one, and a pass of few tokens has few of them"

    refill: bool = False
