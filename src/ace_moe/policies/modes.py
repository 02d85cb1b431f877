"""MoDES: gates weighed by how much the model's answer depends on the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import PolicyError
from ..rule import Form, Gain
from .base import Routing, Tables, TokenPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..text import Windows


@dataclass(frozen=True, kw_only=True)
class Modes(TokenPolicy):
    """c_i = α_l g_i / Σ_j g_j, [T, k] (Huang et al., MoDES, CVPR 2026).

    α_l = mean over tokens of KL(p ‖ p without layer l's routed experts), scaled to sum 1 over layers. Survivors are not
    renormalised. Its thresholds for text and vision come from a frontier search; with text alone that is one threshold.
    MoDES does not protect the top slot; here the common safeguard does (`modes:ace-paper` is without it).
    """

    name: ClassVar[str] = "modes"
    needs: ClassVar[tuple[str, ...]] = ("modes_alpha",)
    calibrated: ClassVar[bool] = True

    gain: Gain = "none"

    @property
    def form(self) -> Form:
        return Form(factor="modes_alpha")

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        from .calibration import needed, silenced, sites

        ids, places = needed(windows).ids.to(model.device), sites(model)
        loss = torch.zeros(len(places), dtype=torch.float64)
        for window in ids.split(1):
            whole = _log_probabilities(model, window)
            for number, site in enumerate(places):
                with silenced(model, site):
                    loss[number] += _kl(whole, _log_probabilities(model, window))
        alpha = (loss / loss.sum().clamp(min=1e-30)).float()
        return {site.key: {"modes_alpha": alpha[number]} for number, site in enumerate(places)}


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    from .calibration import token_logits

    return token_logits(model, ids).float().log_softmax(-1)


def _kl(whole: Tensor, without: Tensor) -> float:
    """Σ over tokens of relu(KL); rounding can make it negative."""
    return float(F.kl_div(without, whole, reduction="none", log_target=True).sum(-1).clamp(min=0).double().sum())


@dataclass(frozen=True, kw_only=True)
class ModesAsCompared(Modes):
    """What the ACE paper's release ran as MoDES: the same score, and a token may lose its top slot and all others."""

    name: ClassVar[str] = "modes:ace-paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_active != 1 or self.min_mass != 0:
            raise PolicyError(f"Policy {self.name!r} has no safeguards. Use 'modes', which has them.")

    def protected(self, routing: Routing) -> Tensor:
        return self.contribution(routing)
