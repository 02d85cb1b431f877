"""Gates relative to the token's largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..rule import EPSILON, Gain
from .base import Routing, TokenPolicy


def to_largest(score: Tensor) -> Tensor:
    """s_i / max_j s_j of each token, [T, k]; the largest is exactly 1."""
    return score / score.max(-1, keepdim=True).values.clamp(min=EPSILON)


@dataclass(frozen=True, kw_only=True)
class Relative(TokenPolicy):
    """c_i = g_i / max_j g_j, [T, k] (ik_llama.cpp's `-ser Kmin,t`: min_active = Kmin, threshold = t).

    The engine divides kept weights by their sum where the model normalises its gates.
    """

    name: ClassVar[str] = "relative"

    gain: Gain = "kept"

    def contribution(self, routing: Routing) -> Tensor:
        return to_largest(routing.gates.float().abs())
