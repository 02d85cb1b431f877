"""Layer factors from a text: how to spread a budget over layers, and the gain that fits each best."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import rule
from ...checkpoint import MoEModel
from ...engines.transformers import attached_to
from ...engines.transformers.modules import run_experts
from ...mapping.passes import attached
from ...plan import Plan
from ...policies import Decision, Routing, TokenPolicy
from ...scoring.fidelity import compare
from ...scoring.predictions import predict

Numbers = dict[str, float]  # by layer
SMALLEST = 1e-3  # of the largest factor: a layer that seems not to matter still has contributions


def as_factor(numbers: Numbers) -> Numbers:
    """Scaled so that the largest is 1, as plans keep factors."""
    most = max(numbers.values())
    return {key: max(value / most, SMALLEST) if most > 0 else 1.0 for key, value in numbers.items()}


# ---- how much a layer's experts change ----------------------------------------------------------------------------------


@torch.inference_mode()
def branch(model: PreTrainedModel, ids: Tensor) -> Numbers:
    """√(RMS of the routed sum / RMS of the layer's output), means over the tokens of ids [B, L]."""
    found: dict[tuple[str, str], float] = {}

    def keep(name: tuple[str, str], module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        found[name] = float(y.float().square().mean(-1).sqrt().mean())

    with ExitStack() as stack:
        for site in MoEModel.of(model).sites:
            for name, module in (("sum", model.get_submodule(site.path)), ("layer", _layer(model, site.path))):
                stack.enter_context(module.register_forward_hook(partial(keep, (site.key, name))))
        predict(model, ids)
    return {
        key: (value / max(found[key, "layer"], 1e-30)) ** 0.5 for (key, name), value in found.items() if name == "sum"
    }


def _layer(model: nn.Module, path: str) -> nn.Module:
    """The member of the list of layers on the way to an experts module; the module that holds it where there is no list."""
    names = path.split(".")
    for number in range(1, len(names)):
        if isinstance(model.get_submodule(".".join(names[:number])), nn.ModuleList):
            return model.get_submodule(".".join(names[: number + 1]))
    return model.get_submodule(".".join(names[:-1]))


@torch.inference_mode()
def sensitivity(model: PreTrainedModel, plan: Plan, policy: TokenPolicy, ids: Tensor, tau: float) -> Numbers:
    """√KL on ids [B, L] when one layer alone skips what lies under τ; a pass for each layer."""
    found: Numbers = {}
    with attached(model, plan, policy) as deciders:
        with deciders.bypass():
            whole = predict(model, ids)
        deciders.set(torch.full((3,), tau))
        for key in deciders:
            for other, decider in deciders.items():  # every other layer is guarded
                decider.weigh(1.0 if other == key else torch.inf)
            found[key] = max(0.0, float(compare(whole, predict(model, ids))[:, 0].sum())) ** 0.5
    return found


# ---- the gain that fits a layer -----------------------------------------------------------------------------------------


@torch.inference_mode()
def fitted_gains(model: PreTrainedModel, plan: Plan, policy: TokenPolicy, ids: Sequence[Tensor], tau: float) -> Numbers:
    """c = Σ⟨y, ŷ⟩ / Σ⟨ŷ, ŷ⟩ of each layer: what brings the skipped sum ŷ closest to the whole one y, over tokens that lost a
    slot at τ, with nothing skipped before."""
    products = {key: torch.zeros(2, dtype=torch.float64) for key in plan.tables}

    def add(key: str, experts: nn.Module, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        assert protected is not None
        y, less = _sums(plain, experts, routing, rule.kept(protected, tau))
        products[key] += torch.stack([(y * less).sum(), (less * less).sum()]).cpu()

    plain = replace(policy, gain="none")
    with attached(model, plan, plain) as deciders, deciders.bypass():
        attachment = attached_to(model)
        assert attachment is not None
        experts = dict(zip(deciders, attachment.experts(), strict=True))
        with deciders.observed(lambda key: partial(add, key, experts[key])):
            for part in ids:
                predict(model, part)
    return {key: float(a / b) if b > 0 and a > 0 else 1.0 for key, (a, b) in products.items()}


def _sums(policy: TokenPolicy, experts: nn.Module, routing: Routing, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The experts' sums of tokens that lose a slot, whole and as the policy would skip and rescale, [T, d] each."""
    lost = ~keep.all(-1)
    assert routing.hidden is not None
    lost = lost if routing.token_mask is None else lost & routing.token_mask
    x, e = routing.hidden.reshape(-1, routing.hidden.shape[-1])[lost], routing.ids[lost]
    if not len(x):  # nothing for a grouped product
        return x.double(), x.double()
    ways = (routing.gates, policy.skip(routing, keep).gates)
    whole, skipped = (run_experts(experts, x, e, gates[lost]).double() for gates in ways)
    return whole, skipped
