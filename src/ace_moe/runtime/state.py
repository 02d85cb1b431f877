"""τ by row, on every device that has layers: one tensor a device, changed in place, so that graphs see the change."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import PADDING, rows_for


class State:
    """`tau` [R] of R rows; padding's stays 0."""

    def __init__(self, budgets: int = 1):
        self.budgets = budgets
        self._values = torch.zeros(rows_for(budgets), dtype=torch.float32, device="cpu")
        self._on: dict[torch.device, Tensor] = {}

    @property
    def tau(self) -> Tensor:
        """[R], a copy."""
        return self._values.clone()

    def on(self, device: torch.device) -> Tensor:
        """The tensor that layers on this device read."""
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = self._values.to(device, copy=True)
        return self._on[device]

    def set(self, tau: Tensor) -> None:
        """[R]"""
        self._values = tau.detach().float().cpu().clone()
        self._values[PADDING] = 0
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self._on.values():
                tensor.copy_(self._values)
