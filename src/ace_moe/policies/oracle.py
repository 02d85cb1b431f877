"""The oracle: what a slot really adds, known only after running it. Not a method to use, but a mark to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import rule
from ..rule import EPSILON, Gain
from .base import Model, Routing, Tables, TokenPolicy, Windows
from .calibration import answers, needed, sites, walk


@dataclass(frozen=True, kw_only=True)
class Oracle(TokenPolicy):
    """c_i = g_i ‖f_i(x)‖ / Σ_j g_j ‖f_j(x)‖, [T, k]."""

    name = "oracle"
    needs_norms = True

    gain: Gain = "none"

    def contribution(self, routing: Routing) -> Tensor:
        assert routing.norms is not None
        return rule.share(routing.gates, routing.norms())


@dataclass(frozen=True, kw_only=True)
class RawOracle(Oracle):
    """c_i = min(1, g_i ‖f_i(x)‖ / s), [T, k], with s the largest g ‖f(x)‖ of the whole model on a text.

    Not normalised per token: layers and tokens with small outputs lose more slots.
    """

    name = "oracle:raw"
    needs = ("oracle_scale",)

    def contribution(self, routing: Routing) -> Tensor:
        assert routing.norms is not None
        return (rule.score(routing.gates, routing.norms()) / routing.tables["oracle_scale"].clamp(min=EPSILON)).clamp(
            max=1
        )

    @torch.no_grad()
    def calibrate(self, model: Model, windows: Windows | None) -> Tables:
        places, largest = sites(model), torch.zeros(())
        for _, experts, call in walk(model, needed(windows).ids, places):
            norm = answers(experts, call.hidden, call.ids).norm(dim=-1)
            largest = torch.maximum(largest, (call.gates.float().abs() * norm).max().cpu())
        return {site.key: {"oracle_scale": largest.clone()} for site in places}
