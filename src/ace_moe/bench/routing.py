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
    experts = int(ace.skippers[0].owner[0].num_experts)  # type: ignore[arg-type]

    def seen(module: nn.Module, args: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        rows = slice(ids.shape[1] - 1, None, ids.shape[1]) if last else slice(None)
        every, kept = args[1][rows], output[0][rows]
        unions.append((len(every.unique()), len(kept[kept < experts].unique())))

    def routed(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        logits.append(router_logits(output, experts))

    fast = [skipper.fast for skipper in ace.skippers]
    paths = {site.router_path for site in MoEModel.of(model).sites} - {None}
    hooks = [skipper.register_forward_hook(seen) for skipper in ace.skippers]
    hooks += [model.get_submodule(str(path)).register_forward_hook(routed) for path in paths]
    try:
        for skipper in ace.skippers:
            skipper.fast = None  # the torch path passes through the skipper's hook
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for skipper, path in zip(ace.skippers, fast, strict=True):
            skipper.fast = path
        for hook in hooks:
            hook.remove()
    tokens = ids.shape[0] if last else ids.numel()
    before, after = (sum(u[i] for u in unions) / len(unions) for i in range(2))
    spread = sum(float(z.float().std(-1).mean()) for z in logits) / max(1, len(logits))
    return Routed(spread, before, after, uniform_union(experts, ace.top_k, tokens))
