"""PESF of EAC-MoE: experts a sequence rarely chooses are dropped for that sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..rule import Gain
from .base import Routing, TokenPolicy
from .naee import squash


@dataclass(frozen=True, kw_only=True)
class Pesf(TokenPolicy):
    """Drop expert e from a sequence of L tokens iff n_e < α L k / E, n_e its slots there (Chen et al., EAC-MoE, ACL 2025).

    c_i = x / (1 + x), [T, k], with x = n_e E / (L k), E the router's experts: τ = α / (1 + α), so the paper's α = 0.3
    and 0.7 are τ = 0.23 and 0.41. For prompts only: a single token has no frequencies and keeps all its slots. Our
    sources do not say what happens to the gates of the rest; taken as renormalised. The top gate is protected here.
    """

    name: ClassVar[str] = "pesf"
    needs_logits: ClassVar[bool] = True  # for the number of experts
    token_local: ClassVar[bool] = False
    limits: ClassVar[str] = "slots of one expert in one sequence go together, and single tokens lose none"

    gain: Gain = "kept"

    def contribution(self, routing: Routing) -> Tensor:
        tokens, k = routing.ids.shape
        length = routing.length or max(tokens, 1)
        if length == 1:
            return torch.ones_like(routing.gates, dtype=torch.float32)
        assert routing.logits is not None
        experts = routing.logits.shape[-1]
        real = routing.ids.new_ones(tokens) if routing.token_mask is None else routing.token_mask.long()
        sequence = torch.arange(tokens, device=real.device) // length
        rows = -(-tokens // length)
        flat = sequence.unsqueeze(-1) * experts + routing.ids
        count = real.new_zeros(rows * experts).index_add(0, flat.flatten(), real.repeat_interleave(k))
        lengths = real.new_zeros(rows).index_add(0, sequence, real)[sequence].clamp(min=1).unsqueeze(-1)
        return squash(count[flat].float() * experts / (lengths * k).float())
