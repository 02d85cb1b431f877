"""REAP: an expert counts as much as its weighted output did on a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Model, Policy, Tables, Windows
from .calibration import answers, needed, sites, walk
from .forms import Gsp
from .subset import UniformPruning


@torch.no_grad()
def saliencies(policy: Policy, model: Model, windows: Windows | None) -> Tables:
    """S_e = mean over the tokens routed to e of g ‖f_e(x)‖, [E] by layer; 0 for experts the text never reached."""
    places = sites(model)
    total = {site.key: torch.zeros(2, site.num_experts, dtype=torch.float64) for site in places}
    for site, experts, call in walk(model, needed(windows).ids, places):
        norm = answers(experts, call.hidden, call.ids).norm(dim=-1)
        weighed = (call.gates.float() * norm).double()
        rows = torch.stack([weighed, torch.ones_like(weighed)]).flatten(1).cpu()
        total[site.key].index_add_(1, call.ids.flatten().cpu(), rows)
    return {key: {"reap_saliency": (s / n.clamp(min=1)).float()} for key, (s, n) in total.items()}


@dataclass(frozen=True, kw_only=True)
class Reap(Gsp):
    """c_i = g_i S(e_i) / Σ_j g_j S(e_j), [T, k], S_e = mean of g ‖f_e(x)‖ over e's tokens (Lasby et al., REAP, ICLR 2026).

    REAP's saliency as a slot score, which REAP itself does not do: it prunes (`reap:prune`). An expert the text never
    reached is given the layer's mean: nothing is known of it.
    """

    name = "reap"
    needs = ("reap_saliency",)
    calibrate = saliencies

    def ready(self, name: str, table: Tensor) -> Tensor:
        mean = table.sum() / (table > 0).sum().clamp(min=1)
        return torch.where(table > 0, table, mean)


@dataclass(frozen=True, kw_only=True)
class ReapPruning(UniformPruning):
    """Remove the same fraction of every layer's experts, those of the lowest saliency S_e (Lasby et al., REAP, ICLR 2026)."""

    name = "reap:prune"
    needs = ("reap_saliency",)
    calibrate = saliencies
