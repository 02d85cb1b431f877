"""The oracle: what a slot really adds, known only after running it. Not a method to use, but a mark to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import rule
from ...policies import Policy, Routing, Tables, TokenPolicy
from ...policies.records import Site
from ...rule import EPSILON, Gain
from ...text import Windows
from .base import Context, context
from .calls import answers, needed, sites, walk


@dataclass(frozen=True, kw_only=True)
class Oracle(TokenPolicy):
    """c_i = g_i ‖f_i(x)‖ / Σ_j g_j ‖f_j(x)‖, [T, k]."""

    name = "oracle"

    gain: Gain = "none"

    def extras(self, model: nn.Module, site: Site) -> Context:
        return Context(model, site)

    def contribution(self, routing: Routing) -> Tensor:
        return rule.share(routing.gates, context(routing).norms(routing))


@dataclass(frozen=True, kw_only=True)
class RawOracle(Oracle):
    """c_i = min(1, g_i ‖f_i(x)‖ / s), [T, k], with s the largest g ‖f(x)‖ of the whole model on a text.

    Not normalised per token: layers and tokens with small outputs lose more slots.
    """

    name = "oracle:raw"
    needs = ("oracle_scale",)

    def contribution(self, routing: Routing) -> Tensor:
        scale = routing.tables["oracle_scale"].clamp(min=EPSILON)
        return (rule.score(routing.gates, context(routing).norms(routing)) / scale).clamp(max=1)


@torch.no_grad()
def scales(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """The largest g ‖f(x)‖ of the whole model on a text, the same for every layer."""
    places, largest = sites(model), torch.zeros(())
    for _, experts, call in walk(model, needed(windows).ids, places):
        norm = answers(experts, call.hidden, call.ids).norm(dim=-1)
        largest = torch.maximum(largest, (call.gates.float().abs() * norm).max().cpu())
    return {site.key: {"oracle_scale": largest.clone()} for site in places}
