"""Rows: what a token is. A row says which τ a token gets and where its slots are counted.

Row 0 is padding; row 1 + 3·b + p is phase p under budget b. A token's phase is what the token is (part of a prompt,
generated, or drafted and not yet accepted), never the width of the pass that computes it. Budget 0 is the engine's own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..budget import PHASES, Phase

PADDING = 0
BUDGETS = 16  # the engine's own, and those of requests or sequences


def row_of(phase: Phase, budget: int = 0) -> int:
    return 1 + len(PHASES) * budget + PHASES.index(phase)


def rows_for(budgets: int) -> int:
    """How many rows this many budgets have, padding included."""
    return 1 + len(PHASES) * budgets


# slots of a prompt's tokens stay skipped: there nearly every expert is read, and restoring would undo the budget
RESTORED = frozenset(row for row in range(1, 128) if PHASES[(row - 1) % len(PHASES)] != "prefill")


class Tokens(Protocol):
    """Where a layer learns what its tokens are. Engines write one of these each."""

    @property
    def counting(self) -> bool:
        """False while layers run again, as in a backward pass with checkpoints."""
        ...

    @property
    def generating(self) -> bool:
        """False where no token of a pass can get slots back, because all are of prompts: the vote is left out then."""
        ...

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        """[T] int8."""
        ...


class Same:
    """Every token the same row, in tensors that are made once for a device and stay where they are: graphs read them."""

    counting = generating = True

    def __init__(self, row: int):
        self.row = row
        self._made: dict[tuple[torch.device, int], Tensor] = {}

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        size = max(64, 1 << (tokens - 1).bit_length())
        if (device, size) not in self._made:
            with torch.inference_mode(False):
                self._made[device, size] = torch.full((size,), self.row, dtype=torch.int8, device=device)
        return self._made[device, size][:tokens]
