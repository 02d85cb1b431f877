"""Alloc-MoE: a budget of activations, shared out over layers by sensitivity and over tokens by score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .. import rule
from ..rule import Gain
from .allocation import LayerwisePolicy, allocate
from .base import Decision, Policy, Routing, Tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..text import Windows
    from .calibration import Change


@dataclass(frozen=True, kw_only=True)
class AllocT(Policy):
    """Every token keeps its top K_base = min_active; of the other slots of all tokens in the layer's pass the largest
    gates are kept until (1 − τ) T k slots run (Liu et al., Alloc-T of Alloc-MoE, ACL 2026).

    The ratio is exact by construction; a token's slots depend on its batch. Our sources do not say what happens to the
    gates; taken as renormalised over the kept, as the model does with its own top-k.
    """

    name: ClassVar[str] = "alloc_t"
    limits: ClassVar[str] = "every token keeps its top slot"

    gain: Gain = "kept"

    def route(self, routing: Routing) -> Decision:
        base = self.guarded(routing, torch.zeros_like(routing.ids, dtype=torch.bool))
        score = routing.gates.float().abs().masked_fill(base, torch.inf)
        slots = torch.ones_like(base)
        if routing.token_mask is not None:  # padding takes no slot from the others
            slots = routing.token_mask.unsqueeze(-1).expand_as(base)
            score = score.masked_fill(~slots, -torch.inf)
        place = score.flatten().argsort(descending=True, stable=True).argsort().view_as(base)
        total = slots.sum()
        return self.skip(routing, base | (place < total - (routing.threshold * total).floor()) | ~slots)


@dataclass(frozen=True, kw_only=True)
class AllocL(LayerwisePolicy):
    """K_l slots in layer l with Σ K_l fixed, minimising Σ_l S[l, K_l] (Liu et al., Alloc-L of Alloc-MoE, ACL 2026).

    S[l, j] is the perplexity with j slots in layer l, one slot in every later layer and all slots in earlier ones.
    Solved exactly by dynamic programming, here for every total. Gates are renormalised, as by a smaller top-k.
    """

    name: ClassVar[str] = "alloc_l"
    needs: ClassVar[tuple[str, ...]] = ("alloc_l_slots",)
    calibrated: ClassVar[bool] = True

    gain: Gain = "kept"

    @property
    def table(self) -> str:
        return "alloc_l_slots"

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        from ..scoring import score
        from .calibration import changed, needed, sites, token_logits

        places, text = sites(model), needed(windows)
        token_logits(model, text.ids[:1].to(model.device))  # a model that predicts nothing has no perplexity
        costs = []
        for number, site in enumerate(places):
            later = {other.path: self.first(1) for other in places[number + 1 :]}
            cost = []
            for j in range(1, site.top_k + 1):
                with changed(model, later | {site.path: self.first(j)}):
                    cost.append(score(model, text).perplexity)
            costs.append(torch.tensor(cost, dtype=torch.float64))
        shares = allocate(costs)
        return {site.key: {"alloc_l_slots": shares[:, n].float()} for n, site in enumerate(places)}

    def first(self, slots: int) -> Change:
        """Experts' arguments with the `slots` largest gates alone."""

        def change(hidden: Tensor, ids: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return hidden, ids, rule.rescale(gates, rule.rank(gates.float().abs(), ids) < slots, self.gain)

        return change
