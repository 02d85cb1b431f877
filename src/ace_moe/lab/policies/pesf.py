"""PESF of EAC-MoE: experts a sequence rarely chooses are dropped for that sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...policies import Routing, TokenPolicy
from ...policies.learned import squash
from ...policies.records import Site
from ...rule import Gain
from .base import Context, context
from .batch import group_sum, marked


@dataclass(frozen=True, kw_only=True)
class Pesf(TokenPolicy):
    """Drop expert e from a sequence of L tokens iff n_e < α L k / E, n_e its slots there (Chen et al., EAC-MoE, ACL 2025).

    c_i = x / (1 + x), [T, k], with x = n_e E / (L k), E the router's experts: τ = α / (1 + α), so the paper's α = 0.3
    and 0.7 are τ = 0.23 and 0.41. For prompts only: a single token has no frequencies and keeps all its slots. Our
    sources do not say what happens to the gates of the rest; taken as renormalised. The top gate is protected here.
    """

    name = "pesf"
    limits = "slots of one expert in one sequence go together, and single tokens lose none"

    gain: Gain = "kept"

    def extras(self, model: nn.Module, site: Site) -> Context:
        return Context(model, site, sequences=True)

    def contribution(self, routing: Routing) -> Tensor:
        each, length = torch.ones_like(routing.gates, dtype=torch.float32), context(routing).length_of(len(routing.ids))
        if length <= 1:
            return each
        experts, ids = context(routing).experts, routing.ids.long()
        count = group_sum(marked(ids, each, experts), routing, length).gather(-1, ids)
        slots = group_sum(each, routing, length).sum(-1, keepdim=True).clamp(min=each.shape[-1])
        return squash(count * experts / slots)
