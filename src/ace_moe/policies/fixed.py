"""The same number of experts for every token, with a denominator of one's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..rule import Form, Gain
from .base import TokenPolicy


@dataclass(frozen=True, kw_only=True)
class Fixed(TokenPolicy):
    """Keep the top-k1 gates, divided by the mass of the router's top-k2: c_i = 1 − rank_i / k, [T, k].

    ("Training-free halving of activated experts", 2026.) k1 follows from the threshold; `denominator` is k2, and 0
    stands for the model's k: gates stay as they are. For k2 ≠ k, w_i = g_i · Σ_top-k p / Σ_top-k2 p.
    """

    name: ClassVar[str] = "fixed"
    stepwise: ClassVar[bool] = True
    limits: ClassVar[str] = "every token keeps the same number of slots, so ratios come in steps of 1/k"

    gain: Gain = "none"

    @property
    def form(self) -> Form:
        return Form(norm="rank")
