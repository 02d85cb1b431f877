"""The router's raw probability: a gate before the top-k normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..rule import Gain
from .base import Routing, TokenPolicy
from .relative import Relative
from .scores import scores


@dataclass(frozen=True, kw_only=True)
class Score(TokenPolicy):
    """c_i = p(e_i), [T, k]: the router's probability over all E experts (the "Score" baseline of Xu et al., ACE, 2026).

    Kept gates are renormalised there.
    """

    name: ClassVar[str] = "score"
    needs_logits: ClassVar[bool] = True

    gain: Gain = "kept"

    def contribution(self, routing: Routing) -> Tensor:
        return scores(routing).gather(-1, routing.ids).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class ScoreAsCompared(Relative):
    """What the ACE paper's release ran as "Score": c_i = g_i / max_j g_j, kept gates renormalised."""

    name: ClassVar[str] = "score:ace-paper"
