"""How a budget finds its τ: measured, from the curve with the correction between measured points, or not at all.

A skipped model sees other states than the dense one whose curve is kept. A measured τ says by how much: it realises r where
the curve says y, and lines through these points, from (0, 0) to the limit, give the y to look for between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BudgetError, out_of_reach
from .curves import Curve, on_line
from .entries import Phase, Threshold, Workload, typed
from .workloads import distinct, labels, pick

How = Literal["measured", "between", "uncorrected"]
EXACT = 1e-9
DRIFT = 0.1  # of the way from the last measured point: it was seen to grow by less
STEP = 2e-3  # a ratio further than this from its budget lies on a step


@dataclass(frozen=True)
class Answer:
    """τ for a budget, how it was found, the ratio to expect of it and, between measured points, within what."""

    threshold: float
    how: How
    expected: float
    error: float | None = None
    workload: Workload | None = None
    notice: str | None = None


@dataclass(frozen=True)
class Known:
    """What a plan knows of budgets."""

    thresholds: Sequence[Threshold]
    curves: Sequence[Curve]
    default: str | None  # sha256

    @property
    def workloads(self) -> list[Workload]:
        return distinct([*(t.workload for t in self.thresholds), *(c.workload for c in self.curves)])

    @property
    def newest(self) -> str | None:
        found = [c.workload for c in self.curves[-1:]] + [t.workload for t in self.thresholds[-1:]]
        return found[-1].sha256 if found else None

    def answer(self, settings: Mapping[str, Any], budget: float, phase: Phase, workload: str | None) -> Answer:
        """Budget 0 needs to know nothing."""
        named = pick(self.workloads, workload).sha256 if workload is not None else None
        if budget == 0:
            return Answer(0.0, "measured", 0.0)
        entries = [t for t in self.thresholds if t.fits(settings) and t.phase in (phase, "both")]
        of = named or self._usual(settings, entries)
        entries = [t for t in entries if t.workload.sha256 == of]
        curve = next((c for c in self.curves if of and c.of(settings, of)), None)
        for entry in entries:
            if abs(entry.budget - budget) < EXACT:
                how: How = "measured" if entry.corrected else "uncorrected"
                return Answer(entry.threshold, how, entry.realised, workload=entry.workload)
        if curve is not None:
            return _from_curve(curve, [t for t in entries if t.corrected and t.phase == "both"], budget)
        return self._between(entries, settings, budget, workload)

    def _usual(self, settings: Mapping[str, Any], entries: Sequence[Threshold]) -> str | None:
        """The default text where it has something for these settings, else the newest that has."""
        curves = [c.workload.sha256 for c in self.curves if c.of(settings, c.workload.sha256)]
        has = [*curves, *(t.workload.sha256 for t in entries)]
        return self.default if self.default in has else has[-1] if has else None

    def _between(
        self, entries: Sequence[Threshold], settings: Mapping[str, Any], budget: float, workload: str | None
    ) -> Answer:
        """τ on a line between two mapped budgets, where there is no curve: searched policies, plans of schema 1."""
        by_budget = {t.budget: t.threshold for t in entries} | {0.0: 0.0}
        below = max((b for b in by_budget if b < budget), default=None)
        above = min((b for b in by_budget if b > budget), default=None)
        if not entries or below is None or above is None:
            raise BudgetError(self._no_entry(settings, budget, workload, entries))
        tau = by_budget[below] + (budget - below) / (above - below) * (by_budget[above] - by_budget[below])
        notice = (
            f"no threshold was mapped for {budget:.1%}: τ = {tau:.6f} is interpolated between {below:.0%} and "
            f"{above:.0%}; the realised ratio may differ"
        )
        return Answer(tau, "uncorrected", budget, workload=entries[0].workload, notice=notice)

    def _no_entry(
        self, settings: Mapping[str, Any], budget: float, workload: str | None, entries: Sequence[Threshold]
    ) -> str:
        had = ", ".join(f"{b:.0%}" for b in sorted({t.budget for t in entries}))
        others = distinct(t.workload for t in self.thresholds if t.fits(settings))
        shown = labels(self.workloads)
        elsewhere = f" (on {', '.join(shown[w.sha256] for w in others)} it has some)" if others and workload else ""
        return (
            f"The plan has no threshold for a budget of {budget:.1%} with {_brief(settings)}"
            f"{f' on workload {workload!r}' if workload else ''}: it has {had or 'none'} for these settings{elsewhere}. Map one "
            f"with `ace budget MODEL --plan PLAN --text FILE --budgets {budget:g} {_flags(settings)}`."
        )


# ---- from a curve -------------------------------------------------------------------------------------------------------


def _from_curve(curve: Curve, measured: Sequence[Threshold], budget: float) -> Answer:
    if budget > curve.limit + STEP:
        raise out_of_reach(budget, curve.limit, f"on {curve.workload.name}")
    line = _line(curve, measured)
    tau = curve.threshold(_at(line, budget))
    expected = _at([(y, x) for x, y in line], curve.ratio(tau))
    how: How = "between" if len(line) > 2 else "uncorrected"
    error = _left_out(line, budget) if how == "between" else None
    return Answer(tau, how, expected, error, curve.workload, _notice(budget, expected, error))


def _notice(budget: float, expected: float, error: float | None) -> str:
    if abs(expected - budget) > STEP:
        return f"ratios come in steps here: {expected:.1%} is the nearest to {budget:.1%}"
    if error is None:
        return f"τ for {budget:.1%} is read off the unskipped model's curve, not corrected: expect a point more or less"
    return f"τ for {budget:.1%} is between measured budgets; expect {budget:.1%} within {100 * error:.2f} points"


def _line(curve: Curve, measured: Sequence[Threshold]) -> list[tuple[float, float]]:
    """(realised, what the curve says of that τ), rising in both, from (0, 0) to the limit."""
    points = {t.realised: curve.ratio(t.threshold) for t in measured if 0 < t.realised < curve.limit}
    line, highest = [(0.0, 0.0)], 0.0
    for realised, said in sorted(points.items()):
        highest = min(max(highest, said), curve.limit)
        line.append((realised, highest))
    return [*line, (curve.limit, curve.limit)]


def _at(line: Sequence[tuple[float, float]], x: float) -> float:
    xs, ys = zip(*line, strict=True)
    return on_line(xs, ys, x)


def _left_out(line: Sequence[tuple[float, float]], budget: float) -> float:
    """How wrong the line would be at the measured points next to a budget, had they not been measured."""
    at = min(max(bisect_left(line, (budget,)), 1), len(line) - 1)
    near = [i for i in (at - 1, at) if 0 < i < len(line) - 1]
    errors = [abs(_at([line[i - 1], line[i + 1]], line[i][0]) - line[i][1]) for i in near]
    last = DRIFT * (budget - line[-2][0]) if at == len(line) - 1 else 0.0  # nothing holds the line above but its end
    return max(*errors, last)


# ---- words ----------------------------------------------------------------------------------------------------------------


def _brief(settings: Mapping[str, Any]) -> str:
    params = "".join(f" {k}={v}" for k, v in settings["params"].items())
    factor = f", factor {settings['factor']}" if settings.get("factor") else ""
    return (
        f"policy {settings['policy']}{params}, gain {settings['gain']}, min_active {settings['min_active']}, "
        f"min_mass {settings['min_mass']:g}{factor}"
    )


def _flags(settings: Mapping[str, Any]) -> str:
    """The settings as a command takes them."""
    flags = [f"--policy {typed(settings['policy'], settings['params'])}", f"--gain {settings['gain']}"]
    flags += [f"--min-active {settings['min_active']}"] if settings["min_active"] != 1 else []
    flags += [f"--min-mass {settings['min_mass']:g}"] if settings["min_mass"] else []
    return " ".join(flags)
