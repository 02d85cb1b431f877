"""A number of slots shared out over layers or tokens: LExI by random inputs, Alloc-MoE by a text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import rule
from ...errors import StructureError
from ...policies import Decision, Policy, Routing, Tables
from ...policies.records import Site
from ...rule import Gain
from ...scoring.predictions import score
from ...text import Windows
from .base import PassPolicy, guarded
from .calls import Call, Given, answers, changed, needed, sites, token_logits, watch


def allocate(costs: Sequence[Tensor]) -> Tensor:
    """costs[l][j − 1] of j slots in layer l → the best numbers for every total, [levels, layers], all slots first.

    The exact optimum by dynamic programming: best[b] = min_j best of the layers before with b − j, plus this layer's cost
    of j slots.
    """
    best, choices = torch.zeros(1, dtype=torch.float64), []
    for cost in costs:
        k = len(cost)
        padded = torch.full((len(best) + k - 1, k), torch.inf, dtype=torch.float64)  # rows: slots over one a layer
        for j in range(k):
            padded[j : j + len(best), j] = best + cost[j].double()
        best, chosen = padded.min(dim=1)
        choices.append(chosen)
    left = torch.arange(len(best)).flip(0)
    found = []
    for chosen in reversed(choices):
        found.append(chosen[left] + 1)
        left = left - chosen[left]
    return torch.stack(found[::-1], dim=1)


@dataclass(frozen=True, kw_only=True)
class LayerwisePolicy(Policy):
    """Every token of layer l keeps its K_l largest gates; the threshold moves along the totals from all slots to one each.

    Its one table has K_l for every total, [levels].
    """

    limits = "whole slots of whole layers go, so ratios come in steps of one over all slots of a token"

    def route(self, routing: Routing) -> Decision:
        slots = routing.tables[self.needs[0]]
        level = (routing.threshold.clamp(0, 1) * (len(slots) - 1)).round().long()
        number = slots.index_select(0, level.view(-1)).view(-1, 1)  # indexing by a scalar would wait for its value
        keep = rule.rank(routing.gates.float().abs(), routing.ids) < number
        return self.skip(routing, guarded(self, routing, keep))

    def shared_out(self, places: Sequence[Site], costs: Sequence[Tensor]) -> Tables:
        """The table of each layer from the costs of its slots."""
        return {site.key: {self.needs[0]: k.float()} for site, k in zip(places, allocate(costs).unbind(1), strict=True)}


@dataclass(frozen=True, kw_only=True)
class AllocL(LayerwisePolicy):
    """K_l slots in layer l with Σ K_l fixed, minimising Σ_l S[l, K_l] (Liu et al., Alloc-L of Alloc-MoE, ACL 2026).

    S[l, j] is the perplexity with j slots in layer l, one slot in every later layer and all slots in earlier ones.
    Solved exactly by dynamic programming, here for every total. Gates are renormalised, as by a smaller top-k.
    """

    name = "alloc_l"
    needs = ("alloc_l_slots",)

    gain: Gain = "kept"

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        places, text = sites(model), needed(windows)
        token_logits(model, text.ids[:1].to(model.device))  # a model that predicts nothing has no perplexity
        costs = []
        for number, site in enumerate(places):
            later = {other.path: partial(self.first, 1) for other in places[number + 1 :]}
            cost = []
            for j in range(1, site.top_k + 1):
                with changed(model, later | {site.path: partial(self.first, j)}):
                    cost.append(score(model, text).perplexity)
            costs.append(torch.tensor(cost, dtype=torch.float64))
        return self.shared_out(places, costs)

    def first(self, slots: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Given:
        """Experts' arguments with the `slots` largest gates alone."""
        return hidden, ids, rule.rescale(gates, rule.rank(gates.float().abs(), ids) < slots, self.gain)


@dataclass(frozen=True, kw_only=True)
class AllocT(PassPolicy):
    """Every token keeps its top K_base = min_active; of the other slots of all tokens in the layer's pass the largest
    gates are kept until (1 − τ) T k slots run (Liu et al., Alloc-T of Alloc-MoE, ACL 2026).

    The ratio is exact by construction; a token's slots depend on its batch. Our sources do not say what happens to the
    gates; taken as renormalised over the kept, as the model does with its own top-k.
    """

    name = "alloc_t"
    limits = "every token keeps its top slot"

    gain: Gain = "kept"

    def together(self, routing: Routing) -> Decision:
        base = guarded(self, routing, torch.zeros_like(routing.ids, dtype=torch.bool))
        score = routing.gates.float().abs().masked_fill(base, torch.inf)
        slots = torch.ones_like(base)
        if routing.token_mask is not None:  # padding takes no slot from the others
            slots = routing.token_mask.unsqueeze(-1).expand_as(base)
            score = score.masked_fill(~slots, -torch.inf)
        place = score.flatten().argsort(descending=True, stable=True).argsort().view_as(base)
        total = slots.sum()
        return self.skip(routing, base | (place < total - (routing.threshold * total).floor()) | ~slots)


@dataclass(frozen=True, kw_only=True)
class Lexi(LayerwisePolicy):
    """K_l slots in layer l with Σ K_l fixed, minimising Σ_l D_l(K_l) (Chitty-Venkata et al., LExI, 2025). Data-free.

    D_l(j) = mean over X ~ N(0, I) [n, d] of ‖F_l^j(X) − F_l^k(X)‖_F, F_l^j the layer with top-j. The sum has one term a
    layer, so dynamic programming finds the optimum that LExI's evolutionary search looks for. Gates are renormalised,
    as by a smaller top-k.
    """

    name = "lexi"
    needs = ("lexi_slots",)

    gain: Gain = "kept"
    samples: int = 256
    seed: int = 0

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None = None) -> Tables:
        places = sites(model)
        with ExitStack() as stack:
            for number, site in enumerate(places):
                if site.norm_path is None or site.router_input != "same":
                    raise _undefined(site)
                noise, norm = torch.Generator().manual_seed(self.seed + number), model.get_submodule(site.norm_path)
                stack.enter_context(norm.register_forward_hook(partial(_gaussian, site, noise)))
            seen = watch(model, torch.ones(1, self.samples, dtype=torch.long), places)
        return self.shared_out(places, [self.distances(model.get_submodule(s.path), seen[s.key]) for s in places])

    def distances(self, experts: nn.Module, call: Call) -> Tensor:
        """D(1) … D(k), [k]."""
        outputs = answers(experts, call.hidden, call.ids)
        order = rule.rank(call.gates.float().abs(), call.ids)
        found = []
        for j in range(1, call.ids.shape[-1] + 1):
            gates = rule.rescale(call.gates.float(), order < j, self.gain)
            found.append(((gates - call.gates.float()).unsqueeze(-1) * outputs).sum(1).norm())
        return torch.stack(found).double().cpu()


def _undefined(site: Site) -> StructureError:
    return StructureError(
        f"LExI is undefined: layer {site.key}: router and experts of {site.path} do not read one normalised tensor that "
        "random numbers could stand for. Policy 'alloc_l' shares slots out by a text instead."
    )


def _gaussian(site: Site, noise: torch.Generator, module: nn.Module, args: Any, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise _undefined(site)
    return torch.randn(output.shape, generator=noise).to(output)
