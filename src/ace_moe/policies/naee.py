"""NAEE's dynamic skipping: a slot goes when its gate is small against the top one, measured by the layer's median."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rule
from ..rule import EPSILON, Gain
from .base import Model, Routing, Tables, TokenPolicy, Windows
from .calibration import all_gates


def squash(x: Tensor) -> Tensor:
    """[0, ∞) → [0, 1), order kept: x / (1 + x)."""
    return x / (1 + x)


@dataclass(frozen=True, kw_only=True)
class Naee(TokenPolicy):
    """Skip slot i iff g_i < κ β_l g_1, with β_l the layer's median of g_(2) / g_(1) (Lu et al., NAEE, ACL 2024).

    c_i = x / (1 + x), [T, k], with x = g_i / (β_l g_1): τ = 1/2 is κ = 1, the published rule for k = 2, where half of
    the second slots go by construction. For k > 2 every slot is held against the same β_l. Kept gates are renormalised.
    The ratio of gates equals the ratio of the router's probabilities.
    """

    name = "naee"
    needs = ("naee_median",)

    gain: Gain = "kept"

    def contribution(self, routing: Routing) -> Tensor:
        median = routing.tables["naee_median"].clamp(min=EPSILON)
        return squash(rule.to_largest(rule.score(routing.gates)) / median)

    def calibrate(self, model: Model, windows: Windows | None) -> Tables:
        return {key: {"naee_median": second_to_first(gates)} for key, gates in all_gates(model, windows).items()}


def second_to_first(gates: Tensor) -> Tensor:
    """The median over tokens of g_(2) / g_(1); a scalar, 1 where there is no second slot."""
    if gates.shape[-1] < 2:
        return torch.ones(())
    top = gates.float().abs().topk(2, dim=-1).values
    return (top[:, 1] / top[:, 0].clamp(min=EPSILON)).median()
