"""Thresholds that keep their budget: after every step each class's log τ moves by what the rule skipped too little.

    log τ += η · (asked − skipped by the rule in this step),   η = RATE · min(1, √tokens / 2)

`skipped` is before slots are restored. All of it happens on the device, so it lives in CUDA graphs and nobody waits; ranks
that count the same slots move alike to the last bit. A class without tokens in a step stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import IntegrationError
from ..kernels import usable
from .decider import Decider
from .state import State

RATE = 0.2
LOWEST, HIGHEST = 1e-5, 4.0  # of τ; no contribution reaches the highest


class Controller:
    """Move the thresholds of the layers on one device towards their targets."""

    def __init__(self, deciders: Mapping[str, Decider], state: State):
        devices = {decider.counts.device for decider in deciders.values()}
        if len(devices) != 1:
            raise IntegrationError(
                "Thresholds can keep a budget by themselves only where all MoE layers are on one device; these are on "
                f"{', '.join(sorted(map(str, devices))) or 'none'}. Map the budget with a text (`ace plan`) instead."
            )
        self.deciders, self.state = list(deciders.values()), state
        self.shared = state.moving_on(next(iter(devices)))
        with torch.inference_mode(False):
            self.seen = torch.zeros(len(self.shared.tau), 2, dtype=torch.int64, device=self.shared.tau.device)
        self.width = sum(decider.top_k for decider in self.deciders)  # slots a token has in all layers

    def sync(self) -> None:
        """Forget what was counted until now: it belongs to no step."""
        self._follow()
        self.seen.copy_(torch.stack([decider.counts for decider in self.deciders]).sum(0)[:, :2])

    def step(self) -> None:
        """Move τ behind the last layer of a step."""
        self._follow()
        shared = self.shared
        track([decider.counts for decider in self.deciders], shared.tau, shared.target, self.seen, self.width)

    def _follow(self) -> None:
        """Go along if the model was moved to another device."""
        device = self.deciders[0].counts.device
        if device != self.shared.tau.device:
            self.shared, self.seen = self.state.moving_on(device), self.seen.to(device)


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
