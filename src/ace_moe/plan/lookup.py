"""Look a budget up: its τ as it was measured, from the curve with the correction between measured points, or not at all.

A skipped model sees other states than the dense one whose curve is kept. A measured τ says by how much: it realises r where
the curve says y, and lines through these points, from (0, 0) to the limit, give the y to look for between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import BudgetError, OptionError, out_of_reach
from .curves import Curve, on_line
from .entries import Phase, Threshold, Workload, distinct, labels, pick, typed

if TYPE_CHECKING:
    from .record import Plan

How = Literal["measured", "between", "uncorrected"]
NEEDED = {"policy", "params", "gain", "min_active", "min_mass"}  # of settings that are looked up
EXACT = 1e-9
DRIFT = 0.1  # of the way from the last measured point: it was seen to grow by less
STEP = 2e-3  # a ratio further than this from its budget lies on a step


@dataclass(frozen=True)
class Answer:
    """τ for a budget, how it is known, the ratio to expect of it and, between measured points, within what."""

    threshold: float
    how: How
    expected: float
    error: float | None = None
    workload: Workload | None = None
    notice: str | None = None


ZERO = Answer(0.0, "measured", 0.0)


class Lookup:
    """What a plan knows of budgets under exact settings on one text: `at` is τ for a budget.

    `workload` names the text, by default the plan's own choice. Made once for many budgets.
    """

    def __init__(self, plan: Plan, settings: Mapping[str, Any], workload: str | None = None):
        if missing := NEEDED - set(settings):
            raise OptionError(
                f"Settings name {', '.join(sorted(NEEDED))}; {', '.join(sorted(missing))} are missing. Take them from a "
                'policy: `ace_moe.policies.make("share").settings`.'
            )
        self.plan, self.settings, self.workload = plan, settings, workload
        named = None if workload is None else pick(workloads_of(plan.thresholds, plan.curves), workload).sha256
        fitting = [t for t in plan.thresholds if t.fits(settings)]
        curves = {c.workload.sha256: c for c in plan.curves if c.of(settings, c.workload.sha256)}
        text = named or _usual_text(plan.default_workload, [*curves, *(t.workload.sha256 for t in fitting)])
        self.entries = [t for t in fitting if t.workload.sha256 == text]
        self.curve = None if text is None else curves.get(text)
        corrected = [t for t in self.entries if t.corrected and t.phase == "both"]
        self.correction = None if self.curve is None else Correction(self.curve, corrected)

    def at(self, budget: float, phase: Phase = "both") -> Answer:
        """Measured; else from the curve, corrected between measured points; else on a line between two entries."""
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


def workloads_of(thresholds: Sequence[Threshold], curves: Sequence[Curve]) -> list[Workload]:
    """Every text that something was mapped on."""
    return distinct([*(t.workload for t in thresholds), *(c.workload for c in curves)])


def _usual_text(default: str | None, texts: Sequence[str]) -> str | None:
    """The default text where it has something for these settings, else the newest that has."""
    return default if default in texts else texts[-1] if texts else None


def _between_entries(entries: Sequence[Threshold], budget: float) -> Answer | None:
    """τ on a line between two mapped budgets, where there is no curve: searched policies, plans of schema 1."""
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
        """How wrong the line would be at the measured points next to a budget, had they not been measured."""
        xs, ys = self.xs, self.ys
        at = min(max(bisect_left(xs, budget), 1), len(xs) - 1)
        near = [i for i in (at - 1, at) if 0 < i < len(xs) - 1]
        errors = [abs(on_line([xs[i - 1], xs[i + 1]], [ys[i - 1], ys[i + 1]], xs[i]) - ys[i]) for i in near]
        last = DRIFT * (budget - xs[-2]) if at == len(xs) - 1 else 0.0  # nothing holds the line above but its end
        return max(*errors, last)


# ---- words ----------------------------------------------------------------------------------------------------------------


def _no_threshold(
    plan: Plan, settings: Mapping[str, Any], budget: float, workload: str | None, entries: Sequence[Threshold]
) -> str:
    """What the plan has instead, and the command that maps the budget."""
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
