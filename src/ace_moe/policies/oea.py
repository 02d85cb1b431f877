"""OEA: each token's best experts are loaded for the batch, and tokens use more of what is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import rule
from ..rule import Gain
from .base import Routing
from .subset import BatchPolicy, group_sum, marked


@dataclass(frozen=True, kw_only=True)
class Oea(BatchPolicy):
    """Phase 1: S_base = union over the batch of each token's top k0 = ⌈k (1 − τ)⌉; phase 2: each token walks its ranking
    and adds experts of S_base until it has k. Gates are renormalised over the final set.

    (Opportunistic Expert Activation, 2025, in its best setting: k_max = k, unlimited rank.) k0 is at least min_active.
    """

    name: ClassVar[str] = "oea"

    gain: Gain = "kept"

    def allowed(self, routing: Routing) -> Tensor:
        assert routing.logits is not None
        k = routing.ids.shape[-1]
        base = (k - (routing.threshold * k).floor()).clamp(min=min(self.min_active, k))
        first = rule.rank(routing.gates.float().abs(), routing.ids) < base
        return group_sum(marked(routing.ids, first, routing.logits.shape[-1]), routing, self.group) > 0
