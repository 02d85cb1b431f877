"""Ratio against τ on one text: what a dense pass knows of every budget, as a line through few points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import BUILD, PlanError
from ..schema import maybe, record, text
from .entries import MOST_TAU, SETTINGS, WORKLOAD, Workload, compared

BIN = 2.0**-20  # the least distance of two τ that a pass tells apart
SAME = 1e-7  # ratios are kept in single precision
SHAPING = ("policy", "params", "min_active", "min_mass", "factor")  # the gain shapes no contribution
UNKNOWN = "unknown"
CURVE = record({**SETTINGS, "factor": maybe(text), "workload": WORKLOAD, "tensor": text}, {"date": text}, closed=True)


@dataclass(frozen=True, eq=False)
class Curve:
    """points [2, N] float32: τ, rising, and the ratio of routed slots under it, never falling.

    Between points it is a line. Two points one bin apart are a step: slots of equal contribution cannot be split. It ends
    at the largest ratio that the safeguards leave room for.
    """

    settings: dict[str, Any]
    workload: Workload
    points: Tensor
    date: str = UNKNOWN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Curve):
            return NotImplemented
        same = (self.settings, self.workload) == (other.settings, other.workload)
        return same and torch.equal(self.points, other.points)  # whenever each was made

    def of(self, settings: Mapping[str, Any], sha256: str) -> bool:
        """Whether it belongs to this text and to what shapes contributions there."""
        return self.workload.sha256 == sha256 and compared(self.settings) == compared(shaping(settings))

    @cached_property
    def lines(self) -> tuple[list[float], list[float]]:
        """τ and ratio of each point."""
        taus, ratios = self.points.tolist()
        return taus, ratios

    @property
    def limit(self) -> float:
        return self.lines[1][-1]

    def ratio(self, threshold: float) -> float:
        """The dense model's ratio at τ."""
        return on_line(*self.lines, threshold)

    def threshold(self, budget: float) -> float:
        """The τ of a ratio; in a step that of its nearer end, and in the middle where several τ have one ratio."""
        taus, ratios = self.lines
        at = bisect_left(ratios, min(budget, ratios[-1]) - SAME)
        if at == 0 or ratios[at] - budget <= SAME:
            return self._middle(at)
        if taus[at] - taus[at - 1] <= 1.5 * BIN:
            return self._middle(at if ratios[at] - budget < budget - ratios[at - 1] else at - 1)
        return round(on_line(ratios, taus, budget) / BIN) * BIN

    def _middle(self, at: int) -> float:
        taus, ratios = self.lines
        first, last = bisect_left(ratios, ratios[at]), bisect_right(ratios, ratios[at]) - 1
        return (taus[first] + taus[last]) / 2 if ratios[at] > 0 else 0.0

    def to_json(self, tensor: str) -> dict[str, Any]:
        """The curve but for its points; `tensor` names where they are."""
        return {**self.settings, "workload": vars(self.workload), "tensor": tensor, "date": self.date}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], points: Tensor) -> Curve:
        """From metadata that is checked (`CURVE`), and points that are checked here."""
        taus, ratios = points
        rising = bool((taus.diff() > 0).all()) and bool((ratios.diff() >= 0).all())
        if not points.isfinite().all() or not rising or points.min() < 0 or taus[-1] > MOST_TAU or ratios[-1] > 1:
            raise PlanError(
                f"{facts['tensor']} is not a curve: τ must rise and ratios never fall, from 0 on. Build the plan again with "
                f"{BUILD}."
            )
        date = facts.get("date", UNKNOWN)
        return cls({name: facts[name] for name in SHAPING}, Workload(**facts["workload"]), points, date)


def on_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y on the line through the points, whose x never falls; beyond its ends the ends."""
    at = bisect_left(xs, x)
    if at == 0 or at == len(xs):
        return ys[min(at, len(xs) - 1)]
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])


def shaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that shape contributions."""
    return {name: settings.get(name) for name in SHAPING}
