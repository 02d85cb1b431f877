"""Policies that allow a subset of the experts and re-select inside it: static pruning, where it is the same for every token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...policies import Decision, Routing
from ...policies.records import Site
from ...rule import Gain
from .base import Context, PassPolicy, context, guarded, logits_of, reroute
from .scores import reselect, scores


@dataclass(frozen=True, kw_only=True)
class SubsetPolicy(PassPolicy):
    """Slots of experts outside the subset are filled again from inside it, as a router without their rows would do.

    `refill=False` is another method by the same subset: such slots are skipped, the top gate excepted.
    """

    limits = (
        "it fills the slots of excluded experts with others, so a token runs k experts as long as k are left; "
        "refill=False skips those slots instead"
    )

    refill: bool = True

    @abstractmethod
    def allowed(self, routing: Routing) -> Tensor:
        """[T or 1, E] bool: the experts a token may run."""

    def extras(self, model: nn.Module, site: Site) -> Context:
        return Context(model, site, logits=True)

    def together(self, routing: Routing) -> Decision:
        ids, gates, allowed = routing.ids, routing.gates, self.allowed(routing)
        if self.refill:
            return reroute(self, routing, *reselect(scores(logits_of(routing), ids, gates), ids, gates, allowed))
        inside = allowed.expand(len(ids), -1).gather(-1, ids)
        return self.skip(routing, guarded(self, routing, inside))


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
        return ~self.pruned(routing, context(routing).experts - left).unsqueeze(0)


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


@dataclass(frozen=True, kw_only=True)
class ReapPruning(UniformPruning):
    """Remove the same fraction of every layer's experts, those of the lowest saliency S_e (Lasby et al., REAP, ICLR 2026)."""

    name = "reap:prune"
    needs = ("reap_saliency",)


def removals(routing: Routing, most: int) -> Tensor:
    """How many experts go at this threshold; a tensor."""
    return (routing.threshold * context(routing).experts).ceil().clamp(max=most)


def removed_first(saliency: Tensor) -> Tensor:
    """The place of each expert in the order of removal, [E]; ties go by the lower id."""
    return saliency.argsort(stable=True).argsort()


def as_order(scores: Tensor) -> Tensor:
    """Scores of any number of experts → the fraction of them that goes before each; in [0, 1)."""
    return removed_first(scores.flatten()).reshape(scores.shape).to(torch.float32) / scores.numel()
