"""Static pruning: the threshold is the fraction of a layer's experts that is taken away from every token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rule import Gain
from .base import Routing
from .subset import SubsetPolicy


@dataclass(frozen=True, kw_only=True)
class Pruning(SubsetPolicy):
    """Pruned experts lose their router rows: tokens choose their k among the rest, never fewer than k of them.

    So a pruned model still runs k experts a token: pruning saves memory, not slots.
    """

    gain: Gain = "kept"

    @abstractmethod
    def pruned(self, routing: Routing, most: int) -> Tensor:
        """[E] bool, at most `most` of them."""

    def allowed(self, routing: Routing) -> Tensor:
        experts, k = _experts(routing), routing.ids.shape[-1]
        return ~self.pruned(routing, experts - k if self.refill else experts - 1).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class UniformPruning(Pruning):
    """The same number of experts in every layer: ⌈τE⌉ of the lowest saliency."""

    @abstractmethod
    def saliency(self, routing: Routing) -> Tensor:
        """[E]; higher = keep."""

    def pruned(self, routing: Routing, most: int) -> Tensor:
        return removed_first(self.saliency(routing)) < removals(routing, most)


def removals(routing: Routing, most: int) -> Tensor:
    """How many experts go at this threshold; a tensor."""
    return (routing.threshold * _experts(routing)).ceil().clamp(max=most)


def removed_first(saliency: Tensor) -> Tensor:
    """The place of each expert in the order of removal, [E]; ties go by the lower id."""
    return saliency.argsort(stable=True).argsort()


def _experts(routing: Routing) -> int:
    assert routing.logits is not None
    return routing.logits.shape[-1]


def as_order(scores: Tensor) -> Tensor:
    """Scores of any number of experts → the fraction of them that goes before each; in [0, 1)."""
    return removed_first(scores.flatten()).reshape(scores.shape).to(torch.float32) / scores.numel()
