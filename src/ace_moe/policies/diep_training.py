"""DiEP's optimisation: α of every expert and β of every layer on a frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .calibration import Call, Change, changed, needed, run_experts, sites, token_logits, watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..checkpoint import Site
    from ..text import Windows

RATE, MOMENTUM, DECAY, HALVED_AFTER = 5e-3, 0.8, 5e-2, 40
SMALLEST, LARGEST = 1e-5, 5.0
EARLY, LATE = 2.0, 0.2  # β at the start

Weights = dict[str, Tensor]


def train(model: PreTrainedModel, windows: Windows | None, epochs: int, strength: float) -> tuple[Weights, Weights]:
    """(α [E], β scalar) by layer key. The model's own weights and flags are left as they were."""
    places, text = sites(model), needed(windows).ids.to(model.device)
    seen = [watch(model, ids, places) for ids in text.split(1)]
    alpha, beta = _start(model, places, seen)
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            _epochs(model, places, list(zip(text.split(1), seen, strict=True)), alpha, beta, epochs, strength)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return {k: a.detach().cpu() for k, a in alpha.items()}, {k: b.detach().cpu() for k, b in beta.items()}


def _start(model: PreTrainedModel, places: list[Site], seen: list[dict[str, Call]]) -> tuple[Weights, Weights]:
    alpha, beta = {}, {}
    for number, site in enumerate(places):
        gate = torch.stack([calls[site.key].gates.float().mean() for calls in seen]).mean()
        alpha[site.key] = gate.repeat(site.num_experts).requires_grad_()
        early = number < len(places) / 2
        beta[site.key] = torch.tensor(EARLY if early else LATE, device=gate.device).requires_grad_()
    return alpha, beta


def _epochs(
    model: PreTrainedModel,
    places: list[Site],
    text: list[tuple[Tensor, dict[str, Call]]],
    alpha: Weights,
    beta: Weights,
    epochs: int,
    strength: float,
) -> None:
    of_alpha = torch.optim.SGD(list(alpha.values()), RATE, momentum=MOMENTUM, weight_decay=DECAY)
    of_beta = torch.optim.SGD(list(beta.values()), RATE)
    slower = torch.optim.lr_scheduler.StepLR(of_alpha, HALVED_AFTER, 0.5)
    falling = torch.optim.lr_scheduler.LinearLR(of_beta, 1.0, 0.0, total_iters=epochs * len(text))
    for epoch in range(epochs):
        moves_alpha = epoch % 3 <= 1
        optimiser, schedule = (of_alpha, slower) if moves_alpha else (of_beta, falling)
        for ids, calls in text:
            optimiser.zero_grad()
            apart = [_distance(model, s, calls[s.key], alpha[s.key], beta[s.key]) for s in places]
            loss = strength * torch.stack(apart).sum()
            if moves_alpha:  # β does not enter the model's own output
                loss = loss + _cross_entropy(model, places, alpha, ids) / (epoch + 1)
            loss.backward()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                for weight in (alpha if moves_alpha else beta).values():
                    weight.clamp_(SMALLEST, LARGEST)


def _distance(model: PreTrainedModel, site: Site, call: Call, alpha: Tensor, beta: Tensor) -> Tensor:
    """‖Z − β Σ_{e in top-k} α_e f_e(X)‖ on the unchanged model's inputs."""
    experts = model.get_submodule(site.path)
    whole = run_experts(experts, call.hidden, call.ids, call.gates).detach().float()
    ours = run_experts(experts, call.hidden, call.ids, alpha[call.ids].to(call.gates.dtype)).float()
    return (whole - beta * ours).norm()


def _cross_entropy(model: PreTrainedModel, places: list[Site], alpha: Weights, ids: Tensor) -> Tensor:
    """The model's loss with α in place of every gate."""
    with changed(model, {site.path: _instead(alpha[site.key]) for site in places}):
        logits = token_logits(model, ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _instead(alpha: Tensor) -> Change:
    return lambda hidden, ids, gates: (hidden, ids, alpha[ids].to(gates.dtype))
