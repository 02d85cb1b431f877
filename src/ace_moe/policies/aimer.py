"""AIMER: experts whose weights are all of one size are called removable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..rule import Gain
from .base import Routing
from .pruning import UniformPruning
from .single import Gsp


@dataclass(frozen=True, kw_only=True)
class Aimer(Gsp):
    """c_i = g_i K(e_i) / Σ_j g_j K(e_j), [T, k], with K(e) ∝ rms(W_e) / mean|W_e| (AIMER, 2026, as slot score).

    This is how the ACE paper's release uses AIMER, with kept gates renormalised; the cited method prunes: `aimer:prune`.
    """

    name: ClassVar[str] = "aimer"
    needs: ClassVar[tuple[str, ...]] = ("aimer",)

    gain: Gain = "kept"


@dataclass(frozen=True, kw_only=True)
class AimerPruning(UniformPruning):
    """Remove the experts of each layer with the largest mean|W_e| / rms(W_e) over gate, up and down (AIMER, 2026)."""

    name: ClassVar[str] = "aimer:prune"
    needs: ClassVar[tuple[str, ...]] = ("aimer",)

    def saliency(self, routing: Routing) -> Tensor:
        return routing.tables["aimer"]
