"""DiEP: how much each expert and each layer is worth, learned by gradient on a text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...engines.transformers.modules import run_experts
from ...errors import PolicyError
from ...policies import Routing, Tables
from ...policies.records import Site
from ...text import Windows
from .calls import Call, Given, changed, needed, sites, token_logits, watch
from .subset import Pruning, as_order, removed_first

RATE, MOMENTUM, DECAY, HALVED_AFTER = 5e-3, 0.8, 5e-2, 40
SMALLEST, LARGEST = 1e-5, 5.0
EARLY, LATE = 2.0, 0.2  # β at the start
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Diep(Pruning):
    """Prune the ⌈τLE⌉ experts of the whole model with the least |α_le| β_l, never leaving fewer than k in a layer.

    (Bai et al., DiEP, NeurIPS 2025.) α [E] takes the place of the gates of each layer, β_l weighs its output; all else
    is frozen. Loss in epoch n: CE(α) / (n + 1) + λ Σ_l ‖Z_l − β_l Σ_{e in top-k} α_e f_e(X_l)‖. Two epochs in three move
    α (SGD 5e-3, momentum 0.8, decay 0.05, halved every 40 steps), the third β (SGD 5e-3, falling linearly); both are
    clamped to [1e-5, 5]. β starts at 2 in the first half of the layers and 0.2 in the second. α starts at 1 in DiEP,
    which is made for k = 2; here at the layer's mean gate, so that k = 8 does not start with outputs 8 times too large.
    """

    name = "diep"
    needs = ("diep_order",)

    epochs: int = 9
    strength: float = 0.1  # λ

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise PolicyError(f"epochs must be a whole number of at least 1, not {self.epochs!r}.")

    def pruned(self, routing: Routing, most: int) -> Tensor:
        order = routing.tables["diep_order"]
        return (order < routing.threshold) & (removed_first(order) < most)

    def calibrate(self, model: PreTrainedModel, windows: Windows | None) -> Tables:
        alpha, beta = train(model, windows, self.epochs, self.strength)
        worth = torch.cat([a.abs() * b for a, b in zip(alpha.values(), beta.values(), strict=True)])
        parts = as_order(worth).split([len(a) for a in alpha.values()])
        return {key: {"diep_order": part} for key, part in zip(alpha, parts, strict=True)}


# ---- the optimisation of α and β on a frozen model ----------------------------------------------------------------------


def train(model: PreTrainedModel, windows: Windows | None, epochs: int, strength: float) -> tuple[Weights, Weights]:
    """(α [E], β scalar) by layer key. The model's own weights and flags are left as they were."""
    places, text = sites(model), needed(windows).ids.to(model.device)
    seen = [watch(model, ids, places) for ids in text.split(1)]
    alpha, beta = _start(places, seen)
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


def _start(places: list[Site], seen: list[dict[str, Call]]) -> tuple[Weights, Weights]:
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
    with changed(model, {site.path: partial(_instead, alpha[site.key]) for site in places}):
        logits = token_logits(model, ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _instead(alpha: Tensor, hidden: Tensor, ids: Tensor, gates: Tensor) -> Given:
    return hidden, ids, alpha[ids].to(gates.dtype)
