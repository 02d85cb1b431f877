"""The same number of experts for every token, with a denominator of one's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import rule
from ..errors import PolicyError
from ..rule import Gain
from .base import Decision, Routing, TokenPolicy
from .scores import scores


@dataclass(frozen=True, kw_only=True)
class Fixed(TokenPolicy):
    """Keep the top-k1 gates, divided by the mass of the router's top-k2: c_i = 1 − rank_i / k, [T, k].

    ("Training-free halving of activated experts", 2026.) k1 follows from the threshold; `denominator` is k2, and 0
    stands for the model's k: gates stay as they are. For k2 ≠ k, w_i = g_i · Σ_top-k p / Σ_top-k2 p.
    """

    name: ClassVar[str] = "fixed"
    limits: ClassVar[str] = "every token keeps the same number of slots, so ratios come in steps of 1/k"

    gain: Gain = "none"
    denominator: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.denominator, int) or self.denominator < 0:
            raise PolicyError(f"denominator is a number of experts, or 0 for the model's k; not {self.denominator!r}.")

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        return self.denominator > 0

    def contribution(self, routing: Routing) -> Tensor:
        k = routing.ids.shape[-1]
        return (k - rule.rank(routing.gates.float().abs(), routing.ids)).float() / k

    def settle(self, routing: Routing, protected: Tensor) -> Decision:
        decision = super().settle(routing, protected)
        if self.denominator == 0:
            return decision
        scaled = (decision.gates.float() * self._factor(routing)).to(decision.gates.dtype)
        untouched = decision.keep.all(-1, keepdim=True)
        return decision._replace(gates=torch.where(untouched, decision.gates, scaled))

    def _factor(self, routing: Routing) -> Tensor:
        """Σ_top-k p / Σ_top-k2 p, [T, 1]."""
        p = scores(routing)
        largest = p.topk(min(self.denominator, p.shape[-1]), dim=-1).values
        return p.gather(-1, routing.ids).sum(-1, keepdim=True) / largest.sum(-1, keepdim=True)
