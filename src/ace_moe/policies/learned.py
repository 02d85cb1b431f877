"""Scores by a table that a calibration on a text made: the plan carries the table, `ace_moe.lab` makes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rule
from ..rule import EPSILON, Form, Gain
from .base import Routing, TokenPolicy
from .forms import Gsp


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


def squash(x: Tensor) -> Tensor:
    """[0, ∞) → [0, 1), order kept: x / (1 + x)."""
    return x / (1 + x)


@dataclass(frozen=True, kw_only=True)
class Modes(TokenPolicy):
    """c_i = α_l g_i / Σ_j g_j, [T, k] (Huang et al., MoDES, CVPR 2026).

    α_l = mean over tokens of KL(p ‖ p without layer l's routed experts), scaled to sum 1 over layers. Survivors are not
    renormalised. Its thresholds for text and vision come from a frontier search; with text alone that is one threshold.
    MoDES does not protect the top slot; here the common safeguard does (`modes:ace-paper` is without it).
    """

    name = "modes"
    needs = ("modes_alpha",)
    form = Form(factor="modes_alpha")

    gain: Gain = "none"


@dataclass(frozen=True, kw_only=True)
class Reap(Gsp):
    """c_i = g_i S(e_i) / Σ_j g_j S(e_j), [T, k], S_e = mean of g ‖f_e(x)‖ over e's tokens (Lasby et al., REAP, ICLR 2026).

    REAP's saliency as a slot score, which REAP itself does not do: it prunes (`reap:prune`). An expert the text never
    reached is given the layer's mean: nothing is known of it.
    """

    name = "reap"
    needs = ("reap_saliency",)

    def ready(self, name: str, table: Tensor) -> Tensor:
        mean = table.sum() / (table > 0).sum().clamp(min=1)
        return torch.where(table > 0, table, mean)
