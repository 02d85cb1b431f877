"""What token policies read from their tables, learned on a text: NAEE's medians, MoDES' layers, REAP's saliencies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...policies import Policy, Tables
from ...rule import EPSILON
from ...text import Windows
from .calls import all_gates, answers, needed, silenced, sites, token_logits, walk


def medians(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """β_l, the median over tokens of g_(2) / g_(1), a scalar by layer."""
    return {key: {"naee_median": second_to_first(gates)} for key, gates in all_gates(model, windows).items()}


def second_to_first(gates: Tensor) -> Tensor:
    """The median over tokens of g_(2) / g_(1); a scalar, 1 where there is no second slot."""
    if gates.shape[-1] < 2:
        return torch.ones(())
    top = gates.float().abs().topk(2, dim=-1).values
    return (top[:, 1] / top[:, 0].clamp(min=EPSILON)).median()


@torch.no_grad()
def alphas(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """α_l = mean over tokens of KL(p ‖ p without layer l's routed experts), scaled to sum 1 over layers."""
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


def _log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return token_logits(model, ids).float().log_softmax(-1)


@torch.no_grad()
def saliencies(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """S_e = mean over the tokens routed to e of g ‖f_e(x)‖, [E] by layer; 0 for experts the text never reached."""
    places = sites(model)
    total = {site.key: torch.zeros(2, site.num_experts, dtype=torch.float64) for site in places}
    for site, experts, call in walk(model, needed(windows).ids, places):
        norm = answers(experts, call.hidden, call.ids).norm(dim=-1)
        weighed = (call.gates.float() * norm).double()
        rows = torch.stack([weighed, torch.ones_like(weighed)]).flatten(1).cpu()
        total[site.key].index_add_(1, call.ids.flatten().cpu(), rows)
    return {key: {"reap_saliency": (s / n.clamp(min=1)).float()} for key, (s, n) in total.items()}
