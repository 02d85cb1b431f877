"""SERE: slots of secondary experts are re-routed to the most similar expert that the batch runs anyway."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import rule
from ...errors import PolicyError
from ...policies import Decision, Policy, Routing, Tables
from ...rule import Gain
from ...text import Windows
from .base import PassPolicy, guarded, reroute
from .batch import check_group, group_sum, marked
from .calls import needed, products, sites, walk


@dataclass(frozen=True, kw_only=True)
class Sere(PassPolicy):
    """P = union over the batch of each token's top `select` experts; a later slot of expert u outside P goes to
    v = argmax_{v in P} S[u, v] iff S[u, v] ≥ ρ = 1 − τ (Cheng et al., SERE, ICLR 2026).

    S_l [E, E] = 1 − D / max D, with D[p, q] = ‖f_p(X) − f_q(X)‖_F on a text. Gates stay. SERE leaves a token with the
    same expert twice; here the two slots are merged into one, which is the same output and can be counted. `group` is
    the batch in tokens, 0 the whole pass.
    """

    name = "sere"
    needs = ("sere_similarity",)
    limits = (
        "a slot is saved only where a token is sent to an expert it has already, and a pass of many tokens has nearly all "
        "experts among its top ones; group=1 decides as for a batch of one token"
    )

    gain: Gain = "none"
    select: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        if not isinstance(self.select, int) or self.select < 1:
            raise PolicyError(f"select is a number of experts, at least 1; not {self.select!r}.")

    def together(self, routing: Routing) -> Decision:
        similarity, ids = routing.tables["sere_similarity"], routing.ids
        primary = rule.rank(routing.gates.float().abs(), ids) < self.select
        pool = group_sum(marked(ids, primary, len(similarity)), routing, self.group) > 0  # [T, E]
        choice = similarity[ids].masked_fill(~pool.unsqueeze(1), -torch.inf).max(-1)  # [T, k]
        stays = guarded(self, routing, primary | pool.gather(-1, ids))
        move = ~stays & (choice.values >= 1 - routing.threshold) & (routing.threshold > 0)
        return reroute(self, routing, *merge(torch.where(move, choice.indices, ids), routing.gates, move))


@torch.no_grad()
def similarities(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """S [E, E] of each layer, by the outputs of all experts on every token of the text."""
    places = sites(model)
    gram = {site.key: torch.zeros(site.num_experts, site.num_experts, dtype=torch.float64) for site in places}
    for site, experts, call in walk(model, needed(windows).ids, places):
        for part in products(experts, call.hidden, site.num_experts):
            gram[site.key] += part.double().sum(0).cpu()
    return {key: {"sere_similarity": nearness(g)} for key, g in gram.items()}


def nearness(gram: Tensor) -> Tensor:
    """1 − D / max D from the Gram matrix of outputs [E, E]; 1 on the diagonal."""
    square = gram.diagonal()
    distance = (square[:, None] + square[None] - 2 * gram).clamp(min=0).sqrt().fill_diagonal_(0)
    return (1 - distance / distance.max().clamp(min=1e-30)).float()


def merge(ids: Tensor, gates: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moved slots join the slot of their token that has the expert, or the first moved there: ids, gates, keep; [T, k]."""
    k = ids.shape[-1]
    turn = torch.arange(k, device=ids.device) + k * moved
    same = (ids.unsqueeze(-1) == ids.unsqueeze(-2)) & (moved.unsqueeze(-1) | moved.unsqueeze(-2))
    same = same | torch.eye(k, dtype=torch.bool, device=ids.device)
    first = ~(same & (turn.unsqueeze(-2) < turn.unsqueeze(-1))).any(-1)
    total = torch.where(same, gates.float().unsqueeze(-2), 0.0).sum(-1)
    return ids, torch.where(first, total, 0.0), first
