"""How a number of slots is shared out over layers: the exact optimum of a separable cost, for every total."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import rule
from .base import Decision, Policy, Routing


def allocate(costs: Sequence[Tensor]) -> Tensor:
    """costs[l][j − 1] of j slots in layer l → the best numbers for every total, [levels, layers], all slots first.

    Dynamic programming: best[b] = min_j best of the layers before with b − j, plus this layer's cost of j slots.
    """
    best, choices = torch.zeros(1, dtype=torch.float64), []
    for cost in costs:
        k = len(cost)
        padded = torch.full((len(best) + k - 1, k), torch.inf, dtype=torch.float64)  # rows: slots over one a layer
        for j in range(k):
            padded[j : j + len(best), j] = best + cost[j].double()
        best, chosen = padded.min(dim=1)
        choices.append(chosen)
    left = torch.arange(len(best)).flip(0)
    found = []
    for chosen in reversed(choices):
        found.append(chosen[left] + 1)
        left = left - chosen[left]
    return torch.stack(found[::-1], dim=1)


@dataclass(frozen=True, kw_only=True)
class LayerwisePolicy(Policy):
    """Every token of layer l keeps its K_l largest gates; the threshold moves along the totals from all slots to one each."""

    token_local: ClassVar[bool] = True
    limits: ClassVar[str] = "whole slots of whole layers go, so ratios come in steps of one over all slots of a token"

    @property
    @abstractmethod
    def table(self) -> str:
        """The table with K_l for every total, [levels]."""

    def route(self, routing: Routing) -> Decision:
        slots = routing.tables[self.table]
        level = (routing.threshold.clamp(0, 1) * (len(slots) - 1)).round().long()
        number = slots.index_select(0, level.view(-1)).view(-1, 1)  # indexing by a scalar would wait for its value
        keep = rule.rank(routing.gates.float().abs(), routing.ids) < number
        return self.skip(routing, self.guarded(routing, keep))
