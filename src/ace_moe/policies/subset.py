"""Policies that allow a subset of the experts and re-select inside it: static pruning, where it is the same for every token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rule import Gain
from .base import Decision, Policy, Routing
from .scores import experts_of, reselect


@dataclass(frozen=True, kw_only=True)
class SubsetPolicy(Policy):
    """Slots of experts outside the subset are filled again from inside it, as a router without their rows would do.

    `refill=False` is another method by the same subset: such slots are skipped, the top gate excepted.
    """

    needs_logits = True
    limits = (
        "it fills the slots of excluded experts with others, so a token runs k experts as long as k are left; "
        "refill=False skips those slots instead"
    )

    refill: bool = True

    @abstractmethod
    def allowed(self, routing: Routing) -> Tensor:
        """[T or 1, E] bool: the experts a token may run."""

    def route(self, routing: Routing) -> Decision:
        allowed = self.allowed(routing)
        if self.refill:
            return self.reroute(routing, *reselect(routing, allowed))
        inside = allowed.expand(len(routing.ids), -1).gather(-1, routing.ids)
        return self.skip(routing, self.guarded(routing, inside))


@dataclass(frozen=True, kw_only=True)
class Pruning(SubsetPolicy):
    """Pruned experts lose their router rows: tokens choose their k among the rest, never fewer than k of them.

    The threshold is the fraction of experts that is pruned. So a pruned model still runs k experts a token: pruning saves
    memory, not slots.
    """

    gain: Gain = "kept"

    @abstractmethod
    def pruned(self, routing: Routing, most: int) -> Tensor:
        """[E] bool, at most `most` of them."""

    def allowed(self, routing: Routing) -> Tensor:
        left = routing.ids.shape[-1] if self.refill else 1
        return ~self.pruned(routing, experts_of(routing) - left).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class UniformPruning(Pruning):
    """The same number of experts in every layer: ⌈τE⌉ of the lowest saliency, a table [E]."""

    def pruned(self, routing: Routing, most: int) -> Tensor:
        return removed_first(routing.tables[self.needs[0]]) < removals(routing, most)


@dataclass(frozen=True, kw_only=True)
class AimerPruning(UniformPruning):
    """Remove the experts of each layer with the largest mean|W_e| / rms(W_e) over gate, up and down (AIMER, 2026)."""

    name = "aimer:prune"
    needs = ("aimer",)


def removals(routing: Routing, most: int) -> Tensor:
    """How many experts go at this threshold; a tensor."""
    return (routing.threshold * experts_of(routing)).ceil().clamp(max=most)


def removed_first(saliency: Tensor) -> Tensor:
    """The place of each expert in the order of removal, [E]; ties go by the lower id."""
    return saliency.argsort(stable=True).argsort()


def as_order(scores: Tensor) -> Tensor:
    """Scores of any number of experts → the fraction of them that goes before each; in [0, 1)."""
    return removed_first(scores.flatten()).reshape(scores.shape).to(torch.float32) / scores.numel()
