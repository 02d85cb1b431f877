"""τ, targets and restored classes, on every device that has layers: tensors that change in place, so that graphs see it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import PADDING, RESTORED, row_of, rows_for

UNCONTROLLED = float("nan")  # the target of a class whose τ stays where it is


class Shared(NamedTuple):
    """The tensors that layers on one device read, all [R]."""

    tau: Tensor  # f32; padding's stays 0
    target: Tensor  # f32: the ratio that τ is moved towards
    free: Tensor  # int8: whether slots of the row come back where their expert is read anyway


class State:
    """τ, targets and restored rows of R rows."""

    def __init__(self, budgets: int = 1):
        rows = rows_for(budgets)
        self.controlled = False  # whether any τ moves by itself; not asked of a tensor, because compiled passes look
        with torch.device("cpu"):  # an engine may build its layers under another default
            tau, target = torch.zeros(rows, dtype=torch.float32), torch.full((rows,), UNCONTROLLED, dtype=torch.float32)
            self._host = Shared(tau, target, torch.zeros(rows, dtype=torch.int8))
        self._on: dict[torch.device, Shared] = {}
        self._moving: Shared | None = None  # those whose τ moves by itself: a model that was moved leaves others behind

    @property
    def tau(self) -> Tensor:
        """[R], a copy; where τ moves by itself, what it is now: the host waits for the device then."""
        moved = self._moving if self.controlled else None
        return self._host.tau.clone() if moved is None else moved.tau.cpu().clone()

    @property
    def target(self) -> Tensor:
        """[R], a copy."""
        return self._host.target.clone()

    @property
    def restores(self) -> bool:
        return bool(self._host.free.any())

    def on(self, device: torch.device) -> Shared:
        """What layers on this device read, by whichever of its names: `cuda` is `cuda:0`."""
        device = torch.empty(0, device=device).device
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = Shared(*(t.to(device, copy=True) for t in self._host))
        return self._on[device]

    def moving_on(self, device: torch.device) -> Shared:
        """What moves by itself on this device from now on, from where it is."""
        self._host = self._host._replace(tau=self.tau)
        self._moving = self.on(device)
        self._write()
        return self._moving

    def set(self, tau: Tensor, target: Tensor | None = None) -> None:
        """[R] each; without targets they stay."""
        now = tau.detach().float().cpu().clone()
        now[PADDING] = 0
        self._host = self._host._replace(tau=now, target=self._host.target if target is None else target.float().cpu())
        self.controlled = not bool(self._host.target.isnan().all())
        self._write()

    def set_budget(self, tau: Tensor, budget: int, target: Tensor | None) -> None:
        """τ and targets of one budget's phases, [3] each; without targets they stay where they are."""
        first = row_of("prefill", budget)
        every, targets = self.tau, self._host.target.clone()
        every[first : first + len(tau)] = tau
        targets[first : first + len(tau)] = UNCONTROLLED if target is None else target
        self.set(every, targets)

    def restore(self, on: bool) -> None:
        """Whether rows of generated and drafted tokens get slots back."""
        free = torch.tensor(
            [on and row in RESTORED for row in range(len(self._host.free))], dtype=torch.int8, device="cpu"
        )
        self._host = self._host._replace(tau=self.tau, free=free)  # a τ that moved by itself stays where it is
        self._write()

    def _write(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for shared in self._on.values():
                for there, here in zip(shared, self._host, strict=True):
                    there.copy_(here)
