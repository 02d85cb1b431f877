"""Thresholds of a plan: what an entry holds, how it is read, and how a budget finds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import BudgetError

Phase = Literal["both", "prefill", "decode", "verify"]
PHASES: tuple[str, ...] = get_args(Phase)
LONGEST_GAIN = 40  # characters; which gains there are is the policies' business


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
    factor: str | None = None  # name of the table of layer factors
    fidelity: dict[str, Any] | None = None  # what it does to predictions, where that was measured

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for this τ to hold."""
        return {n: getattr(self, n) for n in ("policy", "params", "gain", "min_active", "min_mass", "factor")}

    def fits(self, settings: Mapping[str, Any]) -> bool:
        return compared(self.settings) == compared(settings)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Threshold:
        found = cls(**{**entry, "workload": Workload(**entry["workload"])})
        for name, kind in KINDS.items():
            expect(getattr(found, name), kind, f"thresholds: {name}")
        expect(found.workload.name, str, "thresholds: workload")
        _check_words(found)
        shares = (found.budget, found.realised, found.min_mass)
        if not 0 <= found.threshold <= MOST_TAU or not all(0 <= n <= 1 for n in shares):  # NaN fails either
            raise ValueError(f"threshold entry with budget {found.budget!r} has a value out of range")
        return found


def _check_words(found: Threshold) -> None:
    """What is of the right kind and still means nothing."""
    if found.phase not in PHASES:
        raise ValueError(f"thresholds: phase {found.phase!r:.40} is none of {', '.join(PHASES)}")
    if not 0 < len(found.gain) <= LONGEST_GAIN:
        raise ValueError(f"thresholds: {found.gain!r:.60} is no name of a gain")
    if found.min_active < 0:
        raise ValueError(f"thresholds: min_active is {found.min_active}, less than no slot")


MOST_TAU = 2  # contributions end at 1, τ a little above
NUMBER = (int, float)
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("policy", "gain", "phase"), str),
    **dict.fromkeys(("budget", "threshold", "realised", "min_mass"), NUMBER),
    **{"params": dict, "min_active": int, "passes": int, "corrected": bool},
    **{"factor": (str, type(None)), "fidelity": (dict, type(None))},
}


def expect(value: object, kind: type | tuple[type, ...], name: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.40}")


def compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as entries are found by: what says nothing, no factor and denominator 0, is as if left out.

    Older plans have `"denominator": 0` among the params of policy "fixed".
    """
    params = {name: value for name, value in settings["params"].items() if (name, value) != ("denominator", 0)}
    rest = {name: value for name, value in settings.items() if (name, value) != ("factor", None)}
    return {**rest, "params": params}


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
    matching = [t for t in thresholds if t.fits(settings) and t.phase in (phase, "both")]
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
    factor = f", factor {settings['factor']}" if settings.get("factor") else ""
    return (
        f"policy {settings['policy']}{params}, gain {settings['gain']}, min_active {settings['min_active']}, "
        f"min_mass {settings['min_mass']:g}{factor}"
    )
