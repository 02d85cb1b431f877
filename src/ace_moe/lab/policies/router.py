"""Token policies that go by what the router thinks of every expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import PolicyError
from ...policies import Decision, Routing, TokenPolicy
from ...policies.forms import Fixed
from ...policies.records import Site
from ...rule import Gain
from .base import Context, logits_of
from .scores import scores


@dataclass(frozen=True, kw_only=True)
class Score(TokenPolicy):
    """c_i = p(e_i), [T, k]: the router's probability over all E experts (the "Score" baseline of Xu et al., ACE, 2026).

    Kept gates are renormalised there.
    """

    name = "score"

    gain: Gain = "kept"

    def extras(self, model: nn.Module, site: Site) -> Context:
        return Context(model, site, logits=True)

    def contribution(self, routing: Routing) -> Tensor:
        return scores(logits_of(routing), routing.ids, routing.gates).gather(-1, routing.ids).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class Halving(Fixed):
    """Keep the top-k1 gates, divided by the mass of the router's top-k2: w_i = g_i · Σ_top-k p / Σ_top-k2 p, [T, k].

    ("Training-free halving of activated experts", 2026.) k1 follows from the threshold, and `denominator` is k2; 0 is the
    model's k, which leaves gates as they are.
    """

    name = "halving"

    denominator: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.denominator, int) or self.denominator < 0:
            raise PolicyError(f"denominator is a number of experts, or 0 for the model's k; not {self.denominator!r}.")

    def extras(self, model: nn.Module, site: Site) -> Context:
        return Context(model, site, logits=True)

    def skip(self, routing: Routing, keep: Tensor) -> Decision:
        decision = super().skip(routing, keep)
        if not self.denominator:
            return decision
        p = scores(logits_of(routing), routing.ids, routing.gates)
        largest = p.topk(min(self.denominator, p.shape[-1]), dim=-1).values
        factor = p.gather(-1, routing.ids).sum(-1, keepdim=True) / largest.sum(-1, keepdim=True)
        divided = (decision.gates.float() * factor).to(decision.gates.dtype)
        return decision._replace(gates=torch.where(keep.all(-1, keepdim=True), decision.gates, divided))
