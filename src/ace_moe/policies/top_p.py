"""Top-P: the smallest set of largest gates whose mass exceeds P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..rule import Form, Gain
from .base import TokenPolicy


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

    @property
    def form(self) -> Form:
        return Form(power=2 if self.squared else 1, cumulative=True)
