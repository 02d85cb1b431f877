"""Thresholds of a plan: what an entry holds, how it is read, and how a budget finds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import BudgetError

Phase = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class Workload:
    """The text a threshold was mapped on."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Threshold:
    """τ for one budget under exact settings, and the ratio it realised on the text it was mapped on."""

    policy: str
    params: dict[str, Any]
    gain: str
    min_active: int
    min_mass: float
    budget: float
    threshold: float
    realised: float
    corrected: bool
    passes: int
    workload: Workload
    phase: Phase = "both"

    @property
    def settings(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("policy", "params", "gain", "min_active", "min_mass")}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Threshold:
        found = cls(**{**entry, "workload": Workload(**entry["workload"])})
        for name, kind in KINDS.items():
            expect(getattr(found, name), kind, f"thresholds: {name}")
        expect(found.workload.name, str, "thresholds: workload")
        shares = (found.budget, found.realised, found.min_mass)
        if not 0 <= found.threshold <= MOST_TAU or not all(0 <= n <= 1 for n in shares):  # NaN fails either
            raise ValueError(f"threshold entry with budget {found.budget!r} has a value out of range")
        return found


MOST_TAU = 2  # contributions end at 1, τ a little above
NUMBER = (int, float)
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("policy", "gain", "phase"), str),
    **dict.fromkeys(("budget", "threshold", "realised", "min_mass"), NUMBER),
    **{"params": dict, "min_active": int, "passes": int, "corrected": bool},
}


def expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}")


def look_up(
    thresholds: Sequence[Threshold], settings: Mapping[str, Any], budget: float, phase: Phase, workload: str | None
) -> tuple[float, str | None]:
    """(τ, notice) for a budget: exact entry, or interpolated between two with a notice. Budget 0 needs no entry."""
    if budget == 0:
        return 0.0, None
    entries = _entries(thresholds, settings, phase, workload)
    by_budget = {t.budget: t.threshold for t in entries} | {0.0: 0.0}
    for known, tau in by_budget.items():
        if abs(known - budget) < 1e-9:
            return tau, None
    below = max((b for b in by_budget if b < budget), default=None)
    above = min((b for b in by_budget if b > budget), default=None)
    if not entries or below is None or above is None:
        raise BudgetError(_no_entry(settings, budget, workload, entries))
    tau = by_budget[below] + (budget - below) / (above - below) * (by_budget[above] - by_budget[below])
    return tau, (
        f"no threshold was mapped for {budget:.1%}: τ = {tau:.6f} is interpolated between {below:.0%} and "
        f"{above:.0%}; the realised ratio may differ"
    )


def _entries(
    thresholds: Sequence[Threshold], settings: Mapping[str, Any], phase: Phase, workload: str | None
) -> list[Threshold]:
    matching = [t for t in thresholds if t.settings == dict(settings) and t.phase in (phase, "both")]
    name = workload or (matching[-1].workload.name if matching else None)
    return [t for t in matching if t.workload.name == name]


def _no_entry(settings: Mapping[str, Any], budget: float, workload: str | None, entries: list[Threshold]) -> str:
    had = sorted({t.budget for t in entries})
    where = f" on workload {workload!r}" if workload else ""
    have = (
        f"it has {', '.join(f'{b:.0%}' for b in had)} for these settings" if had else "it has none for these settings"
    )
    return (
        f"The plan has no threshold for a budget of {budget:.1%} with {_brief(settings)}{where}: {have}. "
        f"Map one with `ace budget MODEL --plan PLAN --text FILE --budgets {budget:g}` and the same settings."
    )


def _brief(settings: Mapping[str, Any]) -> str:
    params = "".join(f" {k}={v}" for k, v in settings["params"].items())
    return (
        f"policy {settings['policy']}{params}, gain {settings['gain']}, min_active {settings['min_active']}, "
        f"min_mass {settings['min_mass']:g}"
    )
