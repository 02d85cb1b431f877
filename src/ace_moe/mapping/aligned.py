"""The experts' sums at a τ, whole and skipped: what `aligned` knows of them, mean and spread in each component."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import rule
from ..decider import Runtime
from ..decider.layer import Layer
from ..engines.transformers.modules import run_experts
from ..plan import Plan
from ..plan.shapes import aligned_tables
from ..policies import Decision, Policy, Routing
from ..text import Windows

LARGEST = 4.0  # scale: a component that hardly moves in the skipped sums is not blown up
Statistics = dict[str, Tensor]  # by layer; of alignment [2, d]: scale and shift
Reduce = Callable[[Tensor, Tensor], Tensor]  # of whole sums and skipped ones [T, d]; what it returns is added up


def statistics(runtime: Runtime, tau: float, read: Callable[[], object]) -> Statistics:
    """Scale and shift of the tokens that lose a slot at τ in the text that `read` runs the model over."""

    def moments(y: Tensor, less: Tensor) -> Tensor:
        return torch.stack([n.sum(0) for n in (torch.ones_like(y), y, y * y, less, less * less)])

    return {key: _scale_and_shift(found) for key, found in gathered(runtime, tau, read, moments).items()}


@torch.inference_mode()
def gathered(runtime: Runtime, tau: float, read: Callable[[], object], reduce: Reduce) -> dict[str, Tensor]:
    """By layer: what the experts' sums, whole and skipped at τ, come to, with nothing skipped in the layers before."""
    found: dict[str, list[Tensor]] = {key: [] for key in runtime.layers}

    def see(key: str, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        assert protected is not None
        found[key].append(reduce(*_pair(runtime.layers[key], routing, rule.kept(protected, tau))))

    with runtime.aside(), runtime.observed(lambda key: partial(see, key)):
        read()
    return {key: torch.stack(parts).sum(0).cpu() for key, parts in found.items()}


def _pair(layer: Layer, routing: Routing, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of tokens that lose a slot, whole and as the policy would skip and rescale, [T, d] each."""
    experts, lost = layer.owner(), ~keep.all(-1)
    assert experts is not None and routing.hidden is not None
    lost = lost if routing.token_mask is None else lost & routing.token_mask
    x, e = routing.hidden.reshape(-1, routing.hidden.shape[-1])[lost], routing.ids[lost]
    if not len(x):  # nothing for a grouped product
        return x.double(), x.double()
    ways = (routing.gates, layer.policy.skip(routing, keep).gates)
    whole, skipped = (run_experts(experts, x, e, gates[lost]).double() for gates in ways)
    return whole, skipped


def _scale_and_shift(sums: Tensor) -> Tensor:
    """[5, d] → [2, d]: σ₀ / σ and μ₀ − μ σ₀ / σ; 1 and 0 where fewer than two tokens lost a slot."""
    count = sums[0].clamp(min=1)
    mean, spread = sums[1::2] / count, (sums[2::2] / count - (sums[1::2] / count).square()).clamp(min=0).sqrt()
    some = (sums[0] > 1) & (spread[1] > 0)
    scale = torch.where(some, spread[0] / torch.where(some, spread[1], 1.0), 1.0).clamp(max=LARGEST)
    shift = torch.where(sums[0] > 1, mean[0] - scale * mean[1], 0.0)
    return torch.stack([scale, shift]).float()


def with_statistics(plan: Plan, policy: Policy, windows: Windows, budget: float, found: Statistics) -> Plan:
    """The plan with the scale and shift that belong to a threshold."""
    names = aligned_tables(policy.settings, budget, windows.workload.sha256)
    new = {key: dict(zip(names, both, strict=True)) for key, both in found.items()}
    made = {"params": policy.params, "workload": vars(windows.workload)}
    return plan.with_tables(new, made, shapes=dict.fromkeys(names, ("hidden",)))
