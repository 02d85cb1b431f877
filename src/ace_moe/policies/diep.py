"""DiEP: how much each expert and each layer is worth, learned by gradient on a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import PolicyError
from ..rule import Gain
from .base import Routing, Tables, TokenPolicy
from .naee import squash
from .pruning import Pruning, as_order, removed_first

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..text import Windows


@dataclass(frozen=True, kw_only=True)
class Diep(Pruning):
    """Prune the ⌈τLE⌉ experts of the whole model with the least |α_le| β_l, never leaving fewer than k in a layer.

    (Bai et al., DiEP, NeurIPS 2025.) α [E] takes the place of the gates of each layer, β_l weighs its output; all else
    is frozen. Loss in epoch n: CE(α) / (n + 1) + λ Σ_l ‖Z_l − β_l Σ_{e in top-k} α_e f_e(X_l)‖. Two epochs in three move
    α (SGD 5e-3, momentum 0.8, decay 0.05, halved every 40 steps), the third β (SGD 5e-3, falling linearly); both are
    clamped to [1e-5, 5]. β starts at 2 in the first half of the layers and 0.2 in the second. α starts at 1 in DiEP,
    which is made for k = 2; here at the layer's mean gate, so that k = 8 does not start with outputs 8 times too large.
    """

    name: ClassVar[str] = "diep"
    needs: ClassVar[tuple[str, ...]] = ("diep_order",)
    calibrated: ClassVar[bool] = True

    epochs: int = 9
    strength: float = 0.1  # λ

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise PolicyError(f"epochs must be a whole number of at least 1, not {self.epochs!r}.")

    def pruned(self, routing: Routing, most: int) -> Tensor:
        order = routing.tables["diep_order"]
        return (order < routing.threshold) & (removed_first(order) < most)

    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        from .diep_training import train

        alpha, beta = train(model, windows, self.epochs, self.strength)
        worth = torch.cat([a.abs() * b for a, b in zip(alpha.values(), beta.values(), strict=True)])
        parts = as_order(worth).split([len(a) for a in alpha.values()])
        return {key: {"diep_order": part} for key, part in zip(alpha, parts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class DiepAsCompared(TokenPolicy):
    """What the ACE paper's release ran as DiEP: NAEE's rule for k = 2 on tokens, all or nothing.

    If g_(2) / g_(1) < κ β_l, only the top slot is kept, else all k: every slot of a token has the contribution
    c = x / (1 + x), x = g_(2) / (β_l g_(1)), β_l the layer's median of that ratio.
    """

    name: ClassVar[str] = "diep:ace-paper"
    needs: ClassVar[tuple[str, ...]] = ("naee_median",)
    calibrated: ClassVar[bool] = True

    gain: Gain = "kept"

    def contribution(self, routing: Routing) -> Tensor:
        top = routing.gates.float().abs().topk(min(2, routing.gates.shape[-1]), dim=-1).values
        ratio = top[:, -1:] / (top[:, :1] * routing.tables["naee_median"]).clamp(min=1e-30)
        return squash(ratio).expand_as(routing.gates)

    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        from .naee import Naee

        return Naee().calibrate(model, windows)
