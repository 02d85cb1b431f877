"""Thresholds that keep their budget: after every step each row's log τ moves by what the rule skipped too little.

    log τ += η · (asked − skipped by the rule in this step),   η = RATE · min(1, √tokens / 2)

`skipped` is before slots are restored. All of it happens on the device, so it lives in CUDA graphs and nobody waits; ranks
that count the same slots move alike to the last bit. A row without tokens in a step stays where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..budget import check_budget
from ..errors import BudgetError, IntegrationError, OptionError, PolicyError
from ..kernels import usable
from ..plan import Plan
from ..policies import Policy, TokenPolicy
from .layer import Layer
from .settings import HOST, Skip, by_phase, thresholds
from .state import NONE, State

Control = Literal["fixed", "track"]
CONTROLS: tuple[Control, ...] = ("fixed", "track")
RATE = 0.2
LOWEST, HIGHEST = 1e-5, 4.0  # of τ; above what any contribution reaches lies nothing


class Tracker:
    """The controller of the layers on one device."""

    def __init__(self, layers: Mapping[str, Layer], state: State):
        devices = {layer.counts.device for layer in layers.values()}
        if len(devices) != 1:
            raise IntegrationError(
                "Thresholds can keep a budget by themselves only where all MoE layers are on one device; these are on "
                f"{', '.join(sorted(map(str, devices))) or 'none'}. Map the budget with a text (`ace budget`) instead."
            )
        self.layers, self.state, self.shared = list(layers.values()), state, state.moving_on(next(iter(devices)))
        with torch.inference_mode(False):
            self.seen = torch.zeros(len(self.shared.tau), 2, dtype=torch.int64, device=self.shared.tau.device)
        self.width = sum(layer.width for layer in self.layers)  # slots a token has in all layers

    def sync(self) -> None:
        """What was counted until now is no step's."""
        self._follow()
        self.seen.copy_(torch.stack([layer.counts for layer in self.layers]).sum(0)[:, :2])

    def _follow(self) -> None:
        """Where the model was moved to another device."""
        device = self.layers[0].counts.device
        if device != self.shared.tau.device:
            self.shared, self.seen = self.state.moving_on(device), self.seen.to(device)

    def step(self) -> None:
        """Behind the last layer of a step."""
        self._follow()
        shared = self.shared
        track([layer.counts for layer in self.layers], shared.tau, shared.target, self.seen, self.width)


@torch.library.custom_op("ace_moe::track", mutates_args=("tau", "seen"))
def track(counts: list[Tensor], tau: Tensor, target: Tensor, seen: Tensor, width: int) -> None:
    """counts: [R, 3] of every layer, of which a token has `width` slots; seen [R, 2]."""
    if usable(tau.device):
        from ..kernels.track import launch_track

        return launch_track(counts, tau, target, seen, width, RATE, LOWEST, HIGHEST)
    total = torch.stack(counts).sum(0)[:, :2]
    tau.copy_(moved(tau, target, total - seen, width))
    seen.copy_(total)


def moved(tau: Tensor, target: Tensor, step: Tensor, width: int) -> Tensor:
    """τ [R] after a step that routed and kept `step` [R, 2] slots, of which a token has `width`."""
    routed, kept = step.float().unbind(-1)
    live = (routed > 0) & ~target.isnan()
    skipped = 1 - kept / routed.clamp(min=1)
    rate = RATE * (routed / width).sqrt().div(2).clamp(max=1)
    new = (tau.clamp(LOWEST, HIGHEST).log() + rate * (target.nan_to_num() - skipped)).exp().clamp(LOWEST, HIGHEST)
    return torch.where(live, new, tau)


# ---- settings -------------------------------------------------------------------------------------------------------


def check_control(control: object, policy: Policy) -> Control:
    if control not in CONTROLS:
        raise OptionError(f"control is one of {', '.join(CONTROLS)}, not {control!r}.")
    if control == "track" and not isinstance(policy, TokenPolicy):
        raise PolicyError(
            f"Thresholds move by themselves for policies that decide token by token; {policy.key!r} does not."
        )
    return control


def look_up(
    plan: Plan, policy: Policy, skip: Skip, workload: str | None, control: Control
) -> tuple[Tensor, Tensor | None]:
    """(τ [3], targets [3] or None) for a budget: from the plan, and where thresholds move by themselves from anywhere."""
    return (
        start(plan, policy, skip, workload) if control == "track" else (thresholds(plan, policy, skip, workload), None)
    )


def start(plan: Plan, policy: Policy, skip: Skip, workload: str | None = None) -> tuple[Tensor, Tensor]:
    """(τ to start from, targets), [3] each: a plan without thresholds will do."""
    wanted = [check_budget(b, plan.top_k, policy.min_active) for b in by_phase(skip).values()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where τ starts matters for a few tokens
            tau = thresholds(plan, policy, skip, workload)
    except BudgetError:
        tau = torch.tensor([b / plan.top_k for b in wanted], **HOST)  # flat gates have shares of 1 / k
    return tau, torch.tensor([b if b > 0 else NONE for b in wanted], **HOST)
