"""Do thresholds travel, and what does finding them cost?

Stability: each workload's own τ for every budget, and the ratio a τ realises when it is carried to another workload.
Cost: quantile mapping (one dense pass for all budgets, then correction) against binary search and the walk over a grid of
thresholds that MoDES' frontier search is with one kind of token; in passes and seconds.
Results go into one JSON file that a later run continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import progress
from ...decider import Deciders
from ...errors import OptionError, PolicyError
from ...mapping.fit import Histogram, quantile_fits
from ...mapping.recipe import corrected_fit, fit_budgets, search
from ...policies import Policy
from ...text import Windows
from .store import open_results, write_json
from .subject import Recorder, Subject, by_quantile, identity_of

KIND = "study thresholds"
TOLERANCE = 1e-3  # a tenth of a point of realised ratio, for every way of mapping
POINTS, STEEPNESS, LARGEST = 100, 10.0, 0.71  # MoDES' grid for text: thresholds from 0 to 0.71, exponentially spaced
Results = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """One policy on one model over several workloads. `measured`: carried thresholds are run, not read off histograms."""

    subject: Subject
    policy: Policy
    budgets: tuple[float, ...]
    measured: bool = True
    points: int = POINTS  # of the grid a frontier search walks

    def identity(self, workloads: Sequence[Windows]) -> Results:
        return {
            **identity_of(self.subject.model),
            "policy": self.policy.settings,
            "texts": [w.workload.sha256 for w in workloads],
            "window": workloads[0].ids.shape[1],
            "measured": self.measured,
        }


def study(setup: Study, workloads: Sequence[Windows], path: Path, facts: Results) -> Results:
    """Thresholds of each workload, every transfer between two, and the cost on the first one."""
    _check(setup, workloads)
    results = open_results(path, KIND, setup.identity(workloads)) | facts
    for part in ("workloads", "transfers", "cost"):
        results.setdefault(part, [])
    results["budgets"] = sorted({*results.get("budgets", ()), *setup.budgets})
    with progress.task("parts", len(workloads) + 1) as task:
        for windows in workloads:
            _workload(setup, windows, workloads, results, lambda: write_json(path, results))
            task.advance()
        if not results["cost"]:
            results["cost"] = cost(setup, workloads[0])
    write_json(path, results)
    return results


def _check(setup: Study, workloads: Sequence[Windows]) -> None:
    if not by_quantile(setup.policy):
        raise PolicyError(
            f"Policy {setup.policy.key!r} has no threshold on contributions that could be carried. Choose a token policy, "
            "such as ace or share."
        )
    names = [w.workload.name for w in workloads]
    if len(set(names)) < max(2, len(names)):
        raise OptionError(
            f"Give at least two texts with different names, not {', '.join(names) or 'none'}: repeat --text for each."
        )


def _workload(
    setup: Study, windows: Windows, workloads: Sequence[Windows], results: Results, save: Callable[[], None]
) -> None:
    """One workload's own thresholds, and what they realise on every other."""
    name = windows.workload.name
    known = {(row["workload"], row["budget"]) for row in results["workloads"]}
    todo = [b for b in setup.budgets if (name, b) not in known]
    if not todo:
        return
    with setup.subject.under(setup.policy) as deciders:
        runs = {
            w.workload.name: Recorder(deciders, replace(setup.subject, windows=w), faithful=False) for w in workloads
        }
        seen = {other: run(0.0) for other, run in runs.items()} if not setup.measured else {name: runs[name](0.0)}
        for budget in todo:
            made = fit_budgets(runs[name], [budget], dense=seen[name])[0]
            carried = [_carry(made.threshold, name, to, run, seen) for to, run in runs.items() if to != name]
            text = {"workload": name, "tokens": windows.workload.tokens, "budget": budget}
            results["workloads"].append({**text, "threshold": made.threshold, "realised": made.realised})
            results["transfers"] += [row | {"budget": budget} for row in carried]
            save()


def _carry(threshold: float, source: str, to: str, run: Recorder, seen: Mapping[str, Histogram]) -> Results:
    realised = seen[to].ratio(threshold) if to in seen else run.outcome(threshold).realised
    return {"from": source, "to": to, "threshold": threshold, "realised": realised}


# ---- cost ---------------------------------------------------------------------------------------------------------


def cost(setup: Study, windows: Windows) -> list[Results]:
    """Passes and seconds of each way to map all budgets on one workload, and how far its ratios end from the request."""
    ways: dict[str, Callable[[Recorder], list[float]]] = {
        "quantile": lambda run: _quantile(run, setup.budgets, correct=False),
        "quantile, corrected": lambda run: _quantile(run, setup.budgets, correct=True),
        "binary search": lambda run: [search(run, b, TOLERANCE).threshold for b in setup.budgets],
        "frontier walk": lambda run: _walk(run, setup.budgets, setup.points),
    }
    with setup.subject.under(setup.policy) as deciders:
        subject = replace(setup.subject, windows=windows)
        return [_timed(name, way, deciders, subject, setup.budgets) for name, way in ways.items()]


def _quantile(run: Recorder, wanted: Sequence[float], correct: bool) -> list[float]:
    fits = quantile_fits(run(0.0), wanted)
    return [corrected_fit(run, f, TOLERANCE).threshold if correct else f.threshold for f in fits]


def _walk(run: Recorder, wanted: Sequence[float], points: int) -> list[float]:
    """Up the grid, a pass at each threshold, until the largest budget is met: the first that meets each budget."""
    met: list[tuple[float, float]] = []
    for i in range(1, points + 1):
        tau = LARGEST * math.expm1(STEEPNESS * i / points) / math.expm1(STEEPNESS)
        met.append((tau, run.outcome(tau).realised))
        if met[-1][1] >= max(wanted):
            break
    return [next((tau for tau, realised in met if realised >= budget), met[-1][0]) for budget in wanted]


def _timed(
    name: str, way: Callable[[Recorder], list[float]], deciders: Deciders, subject: Subject, wanted: Sequence[float]
) -> Results:
    run, start = Recorder(deciders, subject, faithful=False), time.perf_counter()
    thresholds = way(run)
    passes, seconds = run.count, time.perf_counter() - start
    realised = [run.outcome(tau).realised for tau in thresholds]  # what was not run is, after the clock stopped
    worst = max(abs(r - b) for r, b in zip(realised, wanted, strict=True))
    found = {"budgets": list(wanted), "realised": realised, "worst": worst}
    return {"way": name, "passes": passes, "seconds": seconds, **found}
