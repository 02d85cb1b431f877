"""The routing of a benchmark: latency depends on how many distinct experts a layer must read.

Random weights can route in ways no trained model does. A run says how wide its router logits spread, how its gates are
shared out and how many experts its tokens need, and is not valid where that is more than 5 % away from what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...ace import ACE
from ...checkpoint.model import MoEModel
from ...policies import Decision, Routing
from ..policies.calls import router_logits
from .routers import uniform_union

TOLERANCE = 0.05
Expected = Callable[[int], float]  # tokens → experts they should need


@dataclass(frozen=True)
class Routed:
    """Means over layers and steps: the standard deviation of a token's logits; the shares of its gates, largest first, [k];
    distinct experts before and after skipping."""

    spread: float
    shares: list[float]
    experts: float
    executed: float
    expected: float

    @property
    def valid(self) -> bool:
        return abs(self.experts / self.expected - 1) <= TOLERANCE


class _Seen:
    """Decisions of the layers in one pass over [B, S] tokens; of the last `steps` tokens of each row, each a step."""

    def __init__(self, shape: tuple[int, int], steps: int | None, experts: int):
        self.shape, self.steps, self.experts = shape, steps, experts
        self.unions: list[tuple[float, float]] = []
        self.shares: list[Tensor] = []
        self.spreads: list[float] = []

    def decided(self, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        kept = torch.where(decision.keep, decision.ids, self.experts)
        self.unions.append((self._union(routing.ids), self._union(kept)))
        gates = routing.gates.float().sort(-1, descending=True).values
        self.shares.append((gates / gates.sum(-1, keepdim=True)).mean(0))

    def _union(self, ids: Tensor) -> float:
        """ids [B · S, k] → distinct experts a step reads; an id past the last expert is none."""
        rows = ids.reshape(*self.shape, -1)[:, -self.steps :].transpose(0, 1) if self.steps else ids.unsqueeze(0)
        rows = rows.flatten(1)
        read = torch.zeros(len(rows), self.experts + 1, device=ids.device).scatter_(1, rows, 1.0)
        return float(read[:, : self.experts].sum(1).mean())

    def routed(self, module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        self.spreads.append(float(router_logits(output, self.experts).float().std(-1).mean()))


@torch.no_grad()
def observe(
    model: PreTrainedModel, ace: ACE, ids: Tensor, steps: int | None = None, expected: Expected | None = None
) -> Routed:
    """Routing of one pass over ids [B, S] with the attached plan; with `steps` of the last ones alone, step by step."""
    experts, batch = next(iter(ace.deciders.values())).experts, len(ids)
    seen = _Seen((batch, ids.shape[1]), steps, experts)
    paths = {site.router_path for site in MoEModel.of(model).sites} - {None}
    with ace.deciders.observed(lambda key: seen.decided), ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(model.get_submodule(str(path)).register_forward_hook(seen.routed))
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    before, after = (sum(u[i] for u in seen.unions) / len(seen.unions) for i in range(2))
    spread = sum(seen.spreads) / max(1, len(seen.spreads))
    tokens = batch if steps else ids.numel()
    uniform = uniform_union(experts, ace.top_k, tokens)
    shares = torch.stack(seen.shares).mean(0).tolist()
    return Routed(spread, shares, before, after, expected(tokens) if expected else uniform)
