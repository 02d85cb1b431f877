"""Look a budget up: its τ as it was measured, from the curve with the correction between measured points, or not at all.

A curve is what one dense pass over a text tells of every budget. A skipped model sees other states than the dense one. A
measured τ says by how much: it realises r where the curve says y, and lines through these points, from (0, 0) to the limit,
give the y to look for between them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import BUILD, BudgetError, OptionError, PlanError, out_of_reach
from ..schema import maybe, record, text
from .entries import MOST_TAU, SETTINGS, WORKLOAD, Phase, Threshold, Workload, compared, distinct, labels, pick, typed

if TYPE_CHECKING:
    from .record import Plan

BIN = 2.0**-20  # the least distance of two τ that a pass tells apart
SAME = 1e-7  # ratios are kept in single precision
SHAPING = ("policy", "params", "min_active", "min_mass", "factor")  # the gain shapes no contribution
UNKNOWN = "unknown"
CURVE = record({**SETTINGS, "factor": maybe(text), "workload": WORKLOAD, "tensor": text}, {"date": text}, closed=True)
How = Literal["measured", "between", "uncorrected"]
NEEDED = {"policy", "params", "gain", "min_active", "min_mass"}  # of settings that are looked up
EXACT = 1e-9
DRIFT = 0.1  # of the way from the last measured point: it was seen to grow by less
STEP = 2e-3  # a ratio further than this from its budget lies on a step


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

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """True if these settings shape contributions as the curve's do."""
        return compared(self.settings) == compared(shaping(settings))

    @cached_property
    def lines(self) -> tuple[list[float], list[float]]:
        """τ and ratio of each point."""
        taus, ratios = self.points.tolist()
        return taus, ratios

    @property
    def limit(self) -> float:
        """The largest ratio that the safeguards leave room for."""
        return self.lines[1][-1]

    def ratio(self, threshold: float) -> float:
        """The dense model's ratio at τ."""
        return on_line(*self.lines, threshold)

    def threshold(self, budget: float) -> float:
        """τ of a ratio: on a step that of the nearer end, and the middle one where several τ have one ratio."""
        taus, ratios = self.lines
        at = bisect_left(ratios, min(budget, ratios[-1]) - SAME)
        if at == 0 or ratios[at] - budget <= SAME:
            return self._middle(at)
        if taus[at] - taus[at - 1] <= 1.5 * BIN:
            return self._middle(at if ratios[at] - budget < budget - ratios[at - 1] else at - 1)
        return round(on_line(ratios, taus, budget) / BIN) * BIN

    def _middle(self, at: int) -> float:
        """The middle of all τ that have the ratio of this point."""
        taus, ratios = self.lines
        first, last = bisect_left(ratios, ratios[at]), bisect_right(ratios, ratios[at]) - 1
        return (taus[first] + taus[last]) / 2 if ratios[at] > 0 else 0.0

    def to_json(self, tensor: str) -> dict[str, Any]:
        """The curve but for its points; `tensor` names where they are."""
        return {**self.settings, "workload": vars(self.workload), "tensor": tensor, "date": self.date}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], points: Tensor) -> Curve:
        """Build a curve from metadata that passed `CURVE`, and from points that are checked here."""
        taus, ratios = points
        rising = bool((taus.diff() > 0).all()) and bool((ratios.diff() >= 0).all())
        if not points.isfinite().all() or not rising or points.min() < 0 or taus[-1] > MOST_TAU or ratios[-1] > 1:
            raise PlanError(
                f"{facts['tensor']} is not a curve: τ must rise and ratios never fall, from 0 on. Build the plan again with "
                f"{BUILD}."
            )
        date = facts.get("date", UNKNOWN)
        return cls({name: facts[name] for name in SHAPING}, Workload(**facts["workload"]), points, date)


@dataclass(frozen=True)
class Answer:
    """τ for a budget, how it is known, the ratio to expect and, between measured points, how far that may be off."""

    threshold: float
    how: How
    expected: float
    error: float | None = None
    workload: Workload | None = None
    notice: str | None = None


ZERO = Answer(0.0, "measured", 0.0)


class Lookup:
    """Budget → τ, under exact settings on one text; made once for many budgets.

    `workload` names the text, by default the plan's own choice.
    """

    def __init__(self, plan: Plan, settings: Mapping[str, Any], workload: str | None = None):
        if missing := NEEDED - set(settings):
            raise OptionError(
                f"Settings name {', '.join(sorted(NEEDED))}; {', '.join(sorted(missing))} are missing. Take them from a "
                'policy: `ace_moe.policies.make("share").settings`.'
            )
        self.plan, self.settings, self.workload = plan, settings, workload
        fitting = [t for t in plan.thresholds if t.fits(settings)]
        curves = {c.workload.sha256: c for c in plan.curves if c.fits(settings)}
        texts = [*curves, *(t.workload.sha256 for t in fitting)]
        # the default text where it has something for these settings, else the newest that has
        sha256 = plan.default_workload if plan.default_workload in texts else next(reversed(texts), None)
        if workload is not None:
            sha256 = pick(workloads_of(plan.thresholds, plan.curves), workload).sha256
        self.entries = [t for t in fitting if t.workload.sha256 == sha256]
        corrected = [t for t in self.entries if t.corrected and t.phase == "both"]
        self.correction = Correction(curves[sha256], corrected) if sha256 in curves else None

    def at(self, budget: float, phase: Phase = "both") -> Answer:
        """Take τ as measured; else from the curve, corrected between measured points; else on a line between two entries."""
        if budget == 0:
            return ZERO
        entries = [t for t in self.entries if t.phase in (phase, "both")]
        for entry in entries:
            if abs(entry.budget - budget) < EXACT:
                how: How = "measured" if entry.corrected else "uncorrected"
                return Answer(entry.threshold, how, entry.realised, workload=entry.workload)
        if self.correction is not None:
            return self.correction.at(budget)
        answer = _between_entries(entries, budget)
        if answer is None:
            raise BudgetError(_no_threshold(self.plan, self.settings, budget, self.workload, entries))
        return answer


class Correction:
    """The unskipped model's curve, bent so that it goes through what measured thresholds realised."""

    def __init__(self, curve: Curve, measured: Sequence[Threshold]):
        """Points (realised, what the curve says of that τ), rising in both, from (0, 0) to the limit."""
        self.curve, self.xs, self.ys = curve, [0.0], [0.0]
        points = {t.realised: curve.ratio(t.threshold) for t in measured if 0 < t.realised < curve.limit}
        for realised, said in sorted(points.items()):
            self.xs.append(realised)
            self.ys.append(min(max(self.ys[-1], said), curve.limit))
        self.xs.append(curve.limit)
        self.ys.append(curve.limit)

    def at(self, budget: float) -> Answer:
        """Read τ off the curve where the correction says that the skipped model realises the budget."""
        curve = self.curve
        if budget > self.xs[-1] + STEP:
            raise out_of_reach(budget, self.xs[-1], f"on {curve.workload.name}")
        tau = curve.threshold(on_line(self.xs, self.ys, budget))
        expected = on_line(self.ys, self.xs, on_line(*curve.lines, tau))
        how: How = "between" if len(self.xs) > 2 else "uncorrected"
        error = self._left_out(budget) if how == "between" else None
        if abs(expected - budget) > STEP:
            notice = f"ratios come in steps here: {expected:.1%} is the nearest to {budget:.1%}"
        elif error is None:
            notice = f"τ for {budget:.1%} is read off the unskipped model's curve, not corrected: expect a point more or less"
        elif budget > self.xs[-2]:
            notice = (
                f"τ for {budget:.1%} is above the largest measured budget; expect it within {100 * error:.2f} points"
            )
        else:
            notice = f"τ for {budget:.1%} is between measured budgets; expect it within {100 * error:.2f} points"
        return Answer(tau, how, expected, error, curve.workload, notice)

    def _left_out(self, budget: float) -> float:
        """Estimate the error at a budget: how far the points next to it are off the line without them."""
        xs, ys = self.xs, self.ys
        at = min(max(bisect_left(xs, budget), 1), len(xs) - 1)
        near = [i for i in (at - 1, at) if 0 < i < len(xs) - 1]
        errors = [abs(on_line([xs[i - 1], xs[i + 1]], [ys[i - 1], ys[i + 1]], xs[i]) - ys[i]) for i in near]
        last = DRIFT * (budget - xs[-2]) if at == len(xs) - 1 else 0.0  # nothing holds the line above but its end
        return max(*errors, last)


def on_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y on the line through the points, whose x never falls; beyond its ends the ends."""
    at = bisect_left(xs, x)
    if at == 0 or at == len(xs):
        return ys[min(at, len(xs) - 1)]
    share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + share * (ys[at] - ys[at - 1])


def shaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the settings that shape contributions."""
    return {name: settings.get(name) for name in SHAPING}


def workloads_of(thresholds: Iterable[Threshold], curves: Iterable[Curve]) -> list[Workload]:
    """Every text that something was mapped on."""
    return distinct([*(t.workload for t in thresholds), *(c.workload for c in curves)])


def _between_entries(entries: Sequence[Threshold], budget: float) -> Answer | None:
    """Draw a line between two mapped budgets, where there is no curve: searched policies, plans of schema 1."""
    by_budget = {t.budget: t.threshold for t in entries} | {0.0: 0.0}
    below = max((b for b in by_budget if b < budget), default=None)
    above = min((b for b in by_budget if b > budget), default=None)
    if not entries or below is None or above is None:
        return None
    tau = by_budget[below] + (budget - below) / (above - below) * (by_budget[above] - by_budget[below])
    notice = (
        f"no threshold was mapped for {budget:.1%}: τ = {tau:.6f} is interpolated between {below:.0%} and {above:.0%}; the "
        "realised ratio may differ"
    )
    return Answer(tau, "uncorrected", budget, workload=entries[0].workload, notice=notice)


def _no_threshold(
    plan: Plan, settings: Mapping[str, Any], budget: float, workload: str | None, entries: Sequence[Threshold]
) -> str:
    """Say what the plan has instead, and which command maps the budget."""
    budgets = ", ".join(f"{b:.0%}" for b in sorted({t.budget for t in entries}))
    shown = labels(workloads_of(plan.thresholds, plan.curves))
    others = [shown[w.sha256] for w in distinct(t.workload for t in plan.thresholds if t.fits(settings))]
    elsewhere = f" (on {', '.join(others)} it has some)" if others and workload else ""
    params = "".join(f" {k}={v}" for k, v in settings["params"].items())
    factor = f", factor {settings['factor']}" if settings.get("factor") else ""
    flags = [f"--policy {typed(settings['policy'], settings['params'])}", f"--gain {settings['gain']}"]
    flags += [f"--min-active {settings['min_active']}"] if settings["min_active"] != 1 else []
    flags += [f"--min-mass {settings['min_mass']:g}"] if settings["min_mass"] else []
    return (
        f"The plan has no threshold for a budget of {budget:.1%} with policy {settings['policy']}{params}, gain "
        f"{settings['gain']}, min_active {settings['min_active']}, min_mass {settings['min_mass']:g}{factor}"
        f"{f' on workload {workload!r}' if workload else ''}: it has {budgets or 'none'} for these settings{elsewhere}. Map one "
        f"with `ace plan MODEL --plan PLAN --text FILE --budgets {budget:g} {' '.join(flags)}`."
    )
