"""MoDES: gates weighed by how much the model's answer depends on the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rule import Form, Gain
from .base import Model, Tables, TokenPolicy, Windows
from .calibration import needed, silenced, sites, token_logits


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

    @torch.no_grad()
    def calibrate(self, model: Model, windows: Windows | None) -> Tables:
        ids, places = needed(windows).ids.to(model.device), sites(model)
        loss = torch.zeros(len(places), dtype=torch.float64)
        for window in ids.split(1):
            whole = _log_probabilities(model, window)
            for number, site in enumerate(places):
                with silenced(model, site):
                    kl = F.kl_div(_log_probabilities(model, window), whole, reduction="none", log_target=True)
                    loss[number] += float(kl.sum(-1).clamp(min=0).double().sum())  # rounding can make it negative
        alpha = (loss / loss.sum().clamp(min=1e-30)).float()
        return {site.key: {"modes_alpha": alpha[number]} for number, site in enumerate(places)}


def _log_probabilities(model: Model, ids: Tensor) -> Tensor:
    return token_logits(model, ids).float().log_softmax(-1)
