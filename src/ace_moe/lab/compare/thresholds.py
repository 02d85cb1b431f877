"""Do thresholds travel, and what does finding them cost?

Stability: each workload's own τ for every budget, and the ratio a τ realises when it is carried to another workload.
Cost: quantile mapping (one dense pass for all budgets, then correction) against binary search and the walk over a grid of
thresholds that MoDES' frontier search is with one kind of token; in passes and seconds.
Results go into one JSON file that a later run continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ... import progress
from ...decider import Deciders
from ...errors import OptionError, PolicyError
from ...mapping.fit import quantile_fits
from ...mapping.passes import attached
from ...mapping.recipe import corrected_fit, fit_budgets, search
from ...policies import Policy
from ...text import Windows
from ..store import THRESHOLDS, Results, ResultsFile, begin_run, put
from .subject import Recorder, Subject, by_quantile, identity_of

TOLERANCE = 1e-3  # a tenth of a point of realised ratio, for every way of mapping
POINTS, STEEPNESS, LARGEST = 100, 10.0, 0.71  # MoDES' grid for text: thresholds from 0 to 0.71, exponentially spaced
KEYS = {"workloads": ("workload", "budget"), "transfers": ("from", "to", "budget"), "cost": ("way",)}


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
    """Measure thresholds of each workload, every transfer between two, and the cost on the first one."""
    _check(setup, workloads)
    file = ResultsFile(path, THRESHOLDS, setup.identity(workloads))
    known = file.read()
    with file.changed() as results:
        begin_run(results, facts)
        results["budgets"] = sorted({*results.get("budgets", ()), *setup.budgets})
        for part in KEYS:
            results.setdefault(part, [])
    with progress.task("parts", len(workloads) + 1) as task:
        for windows in workloads:
            _workload(setup, windows, workloads, known, file)
            task.advance()
        if not known.get("cost"):
            rows = cost(setup, workloads[0])
            with file.changed() as results:
                for row in rows:
                    put(results["cost"], row, KEYS["cost"])
    return file.read()


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


def _workload(setup: Study, windows: Windows, workloads: Sequence[Windows], known: Results, file: ResultsFile) -> None:
    """Measure one workload's own thresholds, and what they realise on every other."""
    name = windows.workload.name
    finished = {(row["workload"], row["budget"]) for row in known.get("workloads", ())}
    missing = [budget for budget in setup.budgets if (name, budget) not in finished]
    if not missing:
        return
    with attached(setup.subject.model, setup.subject.plan, setup.policy) as deciders:
        runs = {
            w.workload.name: Recorder(deciders, replace(setup.subject, windows=w), faithful=False) for w in workloads
        }
        dense = {other: run(0.0) for other, run in runs.items() if other == name or not setup.measured}
        for budget in missing:
            fit = fit_budgets(runs[name], [budget], dense=dense[name])[0]
            realised = {
                to: dense[to].ratio(fit.threshold) if to in dense else run.outcome(fit.threshold).realised
                for to, run in runs.items()
                if to != name
            }
            own = {"workload": name, "tokens": windows.workload.tokens, "budget": budget}
            with file.changed() as results:
                row = own | {"threshold": fit.threshold, "realised": fit.realised}
                put(results["workloads"], row, KEYS["workloads"])
                for to, ratio in realised.items():
                    row = {"from": name, "to": to, "threshold": fit.threshold, "realised": ratio, "budget": budget}
                    put(results["transfers"], row, KEYS["transfers"])


# ---- cost ---------------------------------------------------------------------------------------------------------


def cost(setup: Study, windows: Windows) -> list[Results]:
    """Passes and seconds of each way to map all budgets on one workload, and how far its ratios end from the request."""
    ways: dict[str, Callable[[Recorder], list[float]]] = {
        "quantile": lambda run: _quantile(run, setup.budgets, correct=False),
        "quantile, corrected": lambda run: _quantile(run, setup.budgets, correct=True),
        "binary search": lambda run: [search(run, b, TOLERANCE).threshold for b in setup.budgets],
        "frontier walk": lambda run: _walk(run, setup.budgets, setup.points),
    }
    with attached(setup.subject.model, setup.subject.plan, setup.policy) as deciders:
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
