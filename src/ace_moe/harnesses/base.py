"""What the evaluation harnesses share: one model with a plan attached, its budget and what was skipped."""

from __future__ import annotations

from typing import Any

from ..ace import ACE


class Harness:
    """`model` is the harness's own kind of model with our plan in it."""

    model: Any

    @property
    def ace(self) -> ACE:
        return self.model.ace

    def set_skip(self, skip: float) -> None:
        self.ace.set_skip(skip)
        self.ace.reset()

    @property
    def realised(self) -> float:
        return self.ace.realised
