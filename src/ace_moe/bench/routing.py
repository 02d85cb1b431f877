"""What a benchmark's routing looks like: latency depends on how many distinct experts a layer must read.

Random weights can route in ways no trained model does. A run says how wide its router logits spread and how many experts
its tokens need, and is not valid where that is more than 5 % away from uniform routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ace import ACE
from ..checkpoint.model import MoEModel
from ..policies import Decision, Routing
from ..policies.calibration import router_logits

TOLERANCE = 0.05


@dataclass(frozen=True)
class Routed:
    """Means over layers: the standard deviation of a token's logits; distinct experts before and after skipping."""

    spread: float
    experts: float
    executed: float
    uniform: float

    @property
    def valid(self) -> bool:
        return abs(self.experts / self.uniform - 1) <= TOLERANCE


def uniform_union(experts: int, slots: float, tokens: int) -> float:
    """Distinct experts that `tokens` tokens of `slots` slots each need if every expert is as likely."""
    return experts * (1 - (1 - slots / experts) ** tokens)


@torch.no_grad()
def observe(model: PreTrainedModel, ace: ACE, ids: Tensor, last: bool) -> Routed:
    """Routing of one pass over ids [B, S] with the attached plan; of each row's last token alone with `last`."""
    logits: list[Tensor] = []
    unions: list[tuple[int, int]] = []
    layers = ace.runtime.layers.values()
    experts = next(iter(layers)).mark

    def seen(routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        rows = slice(ids.shape[1] - 1, None, ids.shape[1]) if last else slice(None)
        kept = decision.ids[rows][decision.keep[rows]]
        unions.append((len(routing.ids[rows].unique()), len(kept.unique())))

    def routed(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        logits.append(router_logits(output, experts))

    paths = {site.router_path for site in MoEModel.of(model).sites} - {None}
    hooks = [model.get_submodule(str(path)).register_forward_hook(routed) for path in paths]
    try:
        with ace.runtime.observed(lambda key: seen):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    tokens = ids.shape[0] if last else ids.numel()
    before, after = (sum(u[i] for u in unions) / len(unions) for i in range(2))
    spread = sum(float(z.float().std(-1).mean()) for z in logits) / max(1, len(logits))
    return Routed(spread, before, after, uniform_union(experts, ace.top_k, tokens))
