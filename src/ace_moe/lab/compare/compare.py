"""Methods × budgets × gains on one model and one text, into one JSON file that a later run continues.

The file is written whole after every cell: a kill at any point loses the cell that was running and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from ... import progress
from ...budget import check_budget
from ...checkpoint import MoEModel
from ...errors import AceError, ModelError, OptionError, PlanError
from ...mapping.fit import Fit, Histogram
from ...mapping.recipe import fit_budgets
from ...plan import Plan, missing_table
from ...policies import Policy
from ...scoring.predictions import Score
from ...scoring.statistics import perplexity_change, perplexity_interval, relative_change, token_interval
from ...tables.build import add_tables
from ..policies import calibrated, prepare
from ..policies.oracle import Oracle
from .grid import Grid, Key, class_of
from .oracle import by_expert, table_correlation
from .store import begin_run, open_results, write_json
from .subject import Outcome, Recorder, Subject, by_quantile, dense_pass, identity_of

KIND = "compare"
PROTOCOL = "windows, each by itself"
DETAIL = 0.5  # cells of this budget keep ratios by expert; for all budgets the file would be mostly that
MEASURES = ("kl", "agreement", "acceptance")
Results = dict[str, Any]
T = TypeVar("T")


def compare(subject: Subject, grid: Grid, path: Path, facts: Results) -> Results:
    """Measure every cell that is not in the file yet. `facts` are written beside the numbers."""
    of = identity_of(subject.model)
    subject.plan.check_model(MoEModel.of(subject.model).fingerprint())
    results = open_results(path, KIND, of | identity(subject, grid))
    record = facts.get("provenance", {})
    results |= {k: v for k, v in facts.items() if k != "provenance"}
    results["command"] = commands(results.get("command"), facts.get("command", ""))
    results.setdefault("cells", [])
    finished = {Key(c["method"], c["gain"], c["budget"]) for c in results["cells"]}
    missing = [key for key in grid if key not in finished]
    results["grid"] = merged_grid(results.get("grid"), grid)
    # these look at every expert's output: they save nothing and show what a perfect score could reach
    results["references"] = [m for m in results["grid"]["methods"] if issubclass(class_of(m), Oracle)]
    results["refused"] = {m: why for m, why in results.get("refused", {}).items() if m not in grid.methods}
    if missing or "dense" not in results:
        number = begin_run(results, record)
        with progress.task("cells", len(list(grid)), done=len(list(grid)) - len(missing)) as task:
            Run(subject, grid, path, results, task, number).all(missing)
    write_json(path, results)
    return results


def commands(before: str | None, now: str) -> str:
    """What made the file: a run that adds to it is named behind the earlier ones."""
    return now if before is None else before if now in before.split(" && ") else f"{before} && {now}"


def identity(subject: Subject, grid: Grid) -> Results:
    """What must be the same for a file to be continued, beside the model."""
    workload = subject.windows.workload
    return {
        "protocol": PROTOCOL,
        "text": workload.sha256,
        "calibration": subject.calibration.workload.sha256 if subject.calibration else None,
        "window": subject.windows.ids.shape[1],
        "batch": subject.batch,  # changes rounding, and what methods that decide by batch see
        "safeguards": grid.safeguards,
        "correct": grid.correct,
    }


def merged_grid(before: Results | None, grid: Grid) -> Results:
    """A file may be continued with more methods, budgets or gains."""
    had, keys = before or {"methods": [], "budgets": [], "gains": []}, list(grid)
    new = {"methods": grid.methods, "budgets": [k.budget for k in keys], "gains": [k.gain for k in keys]}
    merged = {name: list(dict.fromkeys([*had[name], *new[name]])) for name in had}
    return merged | {"budgets": sorted(merged["budgets"])}


class Run:
    """One run over the missing cells."""

    def __init__(self, subject: Subject, grid: Grid, path: Path, results: Results, task: progress.Task, number: int):
        self.subject, self.grid, self.path, self.results, self.task = subject, grid, path, results, task
        self.number = number  # of this run in the file

    def all(self, missing: Sequence[Key]) -> None:
        """Policies that need no text share one dense pass; each calibrated one comes after, with a dense pass of its own."""
        first = {key.method: self.grid.gains_of(key.method)[0] for key in missing}
        ready = {
            m: made for m, gain in first.items() if (made := self._tried(m, self.grid.policy, m, gain)) is not None
        }
        free = {method: policy for method, policy in ready.items() if not calibrated(policy)}
        plan = self.subject.plan
        for method, policy in free.items():
            plan = self._tried(method, add_tables, plan, policy.tables, self.subject.model) or plan
        seen = self._dense(plan, free)
        for method in free:
            self._method(method, plan, missing, seen.get(method))
        for method in (m for m in ready if m not in free):
            self._calibrated(method, ready[method], missing)

    def _calibrated(self, method: str, policy: Policy, missing: Sequence[Key]) -> None:
        text = self.subject.calibration or self.subject.windows
        plan = self._tried(method, prepare, self.subject.plan, policy, self.subject.model, text)
        if plan is not None:
            self._method(method, plan, missing, self._dense(plan, {method: policy}).get(method))

    def _tried(self, method: str, step: Callable[..., T], *arguments: Any) -> T | None:
        """`step(…)`; where this model or text has no such thing, the reason goes into the results."""
        try:
            return step(*arguments)
        except AceError as error:
            self.results["refused"][method] = {"budgets": list(self.grid.budgets_of(method)), "reason": str(error)}
            return None

    def _dense(self, plan: Plan, policies: Mapping[str, Policy]) -> dict[str, Histogram]:
        ready = {m: p for m, p in policies.items() if self._tried(m, self._ready, plan, p) is not None}
        watchers = {m: p for m, p in ready.items() if by_quantile(p)}
        if not watchers and "dense" in self.results:
            return {}
        start = time.perf_counter()
        dense, seen = dense_pass(replace(self.subject, plan=plan), watchers)
        if "dense" not in self.results:
            self._describe(plan, dense, time.perf_counter() - start)
        return seen

    def _describe(self, plan: Plan, dense: Score, seconds: float) -> None:
        subject, one_each = self.subject, by_expert(plan)
        self.results["dense"] = {**_measured(dense), "seconds": seconds}
        self.results["tables"] = {
            key: {name: [round(v, 5) for v in table.tolist()] for name, table in layer.items()}
            for key, layer in one_each.items()
        }
        self.results["oracle"] = table_correlation(subject.model, one_each, subject.windows, subject.batch)
        write_json(self.path, self.results)

    def _method(self, method: str, plan: Plan, missing: Sequence[Key], dense: Histogram | None) -> None:
        keys = [key for key in missing if key.method == method]
        for gain in dict.fromkeys(key.gain for key in keys):
            policy = self._tried(method, lambda g: self._ready(plan, self.grid.policy(method, g)), gain)
            if policy is None:
                continue
            with self.subject.under(policy, plan) as deciders:
                passes = Recorder(deciders, self.subject)
                for key in (k for k in keys if k.gain == gain):
                    self._try(key, passes, dense)
                    self.task.advance()

    def _try(self, key: Key, passes: Recorder, dense: Histogram | None) -> None:
        try:
            self._cell(key, passes, dense)
        except AceError as error:
            refused = self.results["refused"].setdefault(key.method, {"budgets": [], "reason": str(error)})
            refused["budgets"] = sorted({*refused["budgets"], key.budget})

    def _cell(self, key: Key, passes: Recorder, dense: Histogram | None) -> None:
        """Nothing of another cell goes into it: τ starts from the dense curve, whatever was found for another gain."""
        start, before = time.perf_counter(), len(passes.asked)
        check_budget(key.budget, self.subject.plan.top_k, passes.policy.min_active)
        found = fit_budgets(passes, [key.budget], correct=self.grid.correct, dense=dense)[0]
        outcome = passes.outcome(found.threshold)
        cell = key._asdict() | self._numbers(found, outcome, abs(key.budget - DETAIL) < 1e-9)
        cell |= {"passes": len(set(passes.asked[before:])), "seconds": time.perf_counter() - start, "run": self.number}
        self.results["cells"].append(cell)
        write_json(self.path, self.results)

    def _numbers(self, found: Fit, outcome: Outcome, detail: bool) -> Results:
        if not math.isfinite(sum(outcome.score.nll)):
            raise ModelError(f"The model gives no numbers (NaN) at τ = {found.threshold:g}.")
        change = perplexity_change(outcome.score, score_of(self.results["dense"]))
        return {
            **_measured(outcome.score),
            **_faithful(outcome.score),
            "change": asdict(change),
            "threshold": found.threshold,
            "realised": outcome.realised,
            "layers": outcome.layers,
            **({"experts": outcome.experts} if detail else {}),
        }

    def _ready(self, plan: Plan, policy: Policy) -> Policy:
        if lacking := plan.lacks(policy.tables):
            raise PlanError(missing_table(policy.key, lacking[0]))
        return policy


def _measured(score: Score) -> Results:
    found = perplexity_interval(score)
    bounds = {"perplexity": score.perplexity, "interval": [found.low, found.high]}
    return {**bounds, "nll": score.nll, "targets": score.targets}


def _faithful(score: Score) -> Results:
    """Means over tokens with their intervals, and KL by window, so that two cells can be compared in pairs."""
    if score.fidelity is None:
        return {}
    means = {n: asdict(token_interval(getattr(score.fidelity, n), score.by_window)) for n in MEASURES}
    return {**means, "kl_by_window": score.fidelity.kl}


# ---- reading results ----------------------------------------------------------------------------------------------


def score_of(entry: Results) -> Score:
    """The score a cell or the dense model was stored with."""
    return Score(entry["nll"], entry["targets"])


def cell_at(results: Results, method: str, gain: str, budget: float) -> Results | None:
    found = (c for c in results["cells"] if (c["method"], c["gain"], c["budget"]) == (method, gain, budget))
    return next(found, None)


def against(results: Results, rival: str) -> list[Results]:
    """Each cell's paired change of perplexity and of KL against the rival's at the same gain and budget."""
    if rival not in results["grid"]["methods"]:
        raise OptionError(f"{rival!r} is not in these results. Choose one of: {', '.join(results['grid']['methods'])}.")
    rows = []
    for cell in results["cells"]:
        other = cell_at(results, rival, cell["gain"], cell["budget"])
        if other is not None and cell["method"] != rival:
            change = perplexity_change(score_of(cell), score_of(other))
            row = {k: cell[k] for k in ("method", "gain", "budget")} | {"rival": rival, **asdict(change)}
            rows.append(row | _kl_change(cell, other))
    return rows


def _kl_change(cell: Results, other: Results) -> Results:
    """Results of earlier releases have no KL."""
    if "kl_by_window" not in cell or "kl_by_window" not in other:
        return {}
    return {"kl": asdict(relative_change(cell["kl_by_window"], other["kl_by_window"]))}


def kl_of(cell: Results) -> float:
    """What tables are sorted by; perplexity stands in for it in results of earlier releases."""
    return cell["kl"]["value"] if "kl" in cell else cell["change"]["value"]
