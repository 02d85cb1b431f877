"""Top-P: the smallest set of largest gates whose mass exceeds P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import rule
from ..rule import Gain
from .base import Routing, TokenPolicy


@dataclass(frozen=True, kw_only=True)
class TopP(TokenPolicy):
    """c_i = 1 − Σ_{j before i} g_j / Σ_j g_j in descending gates, [T, k] (Huang et al., Dynamic MoE, 2024; τ = 1 − P).

    The slot that crosses P is kept, and kept probabilities stay as they are. Their model is trained for it and applies
    the rule to all E experts; here it is applied to the routed k. The ACE paper's comparison renormalised (gain kept).
    `squared`: the mass of g² instead, our variant.
    """

    name: ClassVar[str] = "top_p"

    gain: Gain = "none"
    squared: bool = False

    def contribution(self, routing: Routing) -> Tensor:
        mass = rule.share(routing.gates, squared=self.squared)
        order = rule.rank(routing.gates.float().abs(), routing.ids)
        before = order.unsqueeze(-2) < order.unsqueeze(-1)
        # the sum may pass 1 by a rounding; a negative residual would be skipped at τ = 0
        return (1 - torch.where(before, mass.unsqueeze(-2), 0.0).sum(-1)).clamp(0, 1)
