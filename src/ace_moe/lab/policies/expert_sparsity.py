"""NAEE's expert pruning: the subset whose absence changes the layer's output least."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...policies import Routing, Tables
from ...text import Windows
from .calls import Call, needed, products, sites, walk
from .scores import reselect, scores
from .subset import Pruning, removals

ROWS = 1 << 13  # tokens times sets that are looked at together


@dataclass(frozen=True, kw_only=True)
class ExpertSparsity(Pruning):
    """Prune the set D of ⌈τE⌉ experts with the least Σ_windows ‖F(X) − F(X; D)‖_F (Lu et al., NAEE, ACL 2024).

    F(X; D) is the layer with the router rows of D taken out. All sets are tried where there are at most `enumerate` of
    them (all of Mixtral's); beyond, one expert is added to the last set at a time. `tokens` of the text are used.
    """

    name = "expert_sparsity"
    needs = ("expert_sparsity_pruned",)

    enumerate: int = 500
    tokens: int = 512

    def pruned(self, routing: Routing, most: int) -> Tensor:
        number = removals(routing, most).long().view(1)
        return routing.tables["expert_sparsity_pruned"].index_select(0, number).squeeze(0) > 0

    @torch.no_grad()
    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        places, text = sites(model), needed(windows).ids
        each = max(1, self.tokens // len(text))
        losses: dict[str, list[Loss]] = {site.key: [] for site in places}
        for site, experts, call in walk(model, text[:, :each], places):
            gram = torch.cat(list(products(experts, call.hidden, site.num_experts)))
            losses[site.key].append(Loss(call, gram))
        return {site.key: {"expert_sparsity_pruned": self.search(losses[site.key])} for site in places}

    def search(self, losses: list[Loss]) -> Tensor:
        """[E, E]: row r marks the r experts to prune; rows that would leave fewer than k prolong the greedy order."""
        experts = losses[0].experts
        rows = torch.zeros(experts, experts)
        for r in range(1, experts):
            sets = self._candidates(rows[r - 1], r)
            loss = torch.stack([one(sets) for one in losses]).sum(0)
            rows[r] = sets[int(loss.argmin())].float()
        return rows

    def _candidates(self, last: Tensor, r: int) -> Tensor:
        """[C, E] bool: every set of r experts if there are few, else the last set and one more."""
        experts = len(last)
        if comb(experts, r) <= self.enumerate:
            members = torch.tensor(list(combinations(range(experts), r)))
            return torch.zeros(len(members), experts, dtype=torch.bool).scatter_(1, members, True)
        added = (last == 0).nonzero().flatten()
        return (last > 0).repeat(len(added), 1).scatter_(1, added[:, None], True)


class Loss:
    """‖F(X) − F(X; D)‖_F of one window for any D. With G_t [E, E] the products of expert outputs it is sqrt(Σ_t δᵀ G_t δ),
    δ [T, E] the change of the dense gate vector: no output is summed twice.
    """

    def __init__(self, call: Call, gram: Tensor):
        assert call.logits is not None
        self.ids, self.gates, self.gram, self.experts = call.ids, call.gates, gram, gram.shape[-1]
        self.scores = scores(call.logits, call.ids, call.gates)
        self.dense = self._dense(call.ids, call.gates.float())

    def _dense(self, ids: Tensor, gates: Tensor) -> Tensor:
        """Slots [n, k] as vectors over experts [n, E]."""
        return torch.zeros(len(ids), self.experts, device=ids.device).scatter_add(1, ids, gates)

    def __call__(self, sets: Tensor) -> Tensor:
        """sets [C, E] bool, pruned experts → [C]."""
        parts = sets.to(self.gram.device).split(max(1, ROWS // len(self.dense)))
        return torch.cat([self._together(part) for part in parts]).double().cpu()

    def _together(self, sets: Tensor) -> Tensor:
        """Every set with every token, as C·T tokens that may not use their set."""
        c, t = len(sets), len(self.dense)
        score, ids, gates = (x.repeat(c, 1) for x in (self.scores, self.ids, self.gates))
        ids, gates, keep = reselect(score, ids, gates, ~sets.repeat_interleave(t, dim=0))
        gates = torch.where(keep, gates, 0.0)
        before = self.dense.repeat(c, 1)
        gates = gates * (before.sum(-1, keepdim=True) / gates.sum(-1, keepdim=True).clamp(min=1e-30))
        change = (self._dense(ids, gates) - before).view(c, t, -1).transpose(0, 1)  # [T, C, E]
        return (change @ self.gram * change).sum((0, 2)).clamp(min=0).sqrt()
