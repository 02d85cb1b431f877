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

from ..ace import ACE
from ..budget import Fit, Histogram, check_budget
from ..errors import AceError, ModelError, OptionError, PlanError
from ..offline import add_tables, prepare
from ..plan import Plan, missing_table
from ..policies import POLICIES, Policy
from ..scoring import Score
from .grid import Grid, Key, parse_method
from .mapping import Bench, Near, Outcome, Recorder, by_quantile, dense_pass, fit
from .oracle import by_expert, table_correlation
from .statistics import perplexity_change, perplexity_interval
from .store import open_results, write_json

KIND = "compare"
Results = dict[str, Any]
T = TypeVar("T")


def compare(bench: Bench, grid: Grid, path: Path, facts: Results, done: Callable[[], None] = lambda: None) -> Results:
    """Measure every cell that is not in the file yet. `facts` are written beside the numbers; `done` follows each cell."""
    results = open_results(path, KIND, identity(bench, grid))
    results |= {**facts, "command": commands(results.get("command"), facts.get("command", ""))}
    results.setdefault("cells", [])
    finished = {Key(c["method"], c["gain"], c["budget"]) for c in results["cells"]}
    missing = [key for key in grid if key not in finished]
    for _ in range(len(list(grid)) - len(missing)):
        done()
    results["grid"] = merged_grid(results.get("grid"), grid)
    results["references"] = [m for m in results["grid"]["methods"] if is_reference(m)]
    results["refused"] = {m: why for m, why in results.get("refused", {}).items() if m not in grid.methods}
    if missing or "dense" not in results:
        Run(bench, grid, path, results, done).all(missing)
    write_json(path, results)
    return results


def commands(before: str | None, now: str) -> str:
    """What made the file: a run that adds to it is named behind the earlier ones."""
    return now if before is None else before if now in before.split(" && ") else f"{before} && {now}"


def is_reference(method: str) -> bool:
    """Whether the method looks at every expert's output: it saves nothing and shows what a perfect score could reach."""
    name, _ = parse_method(method)
    return name in POLICIES and POLICIES[name].needs_norms


def identity(bench: Bench, grid: Grid) -> Results:
    """What must be the same for a file to be continued."""
    workload = bench.windows.workload
    return {
        "model": bench.plan.fingerprint["content"],
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "text": workload.sha256,
        "calibration": bench.calibration.workload.sha256 if bench.calibration else None,
        "window": bench.windows.ids.shape[1],
        "batch": bench.batch,  # changes rounding, and what methods that decide by batch see
        "safeguards": grid.safeguards,
        "correct": grid.correct,
    }


def merged_grid(before: Results | None, grid: Grid) -> Results:
    """A file may be continued with more methods, budgets or gains."""
    had = before or {"methods": [], "budgets": [], "gains": []}
    merged = {name: list(dict.fromkeys([*had[name], *getattr(grid, name)])) for name in ("methods", "budgets", "gains")}
    return merged | {"budgets": sorted(merged["budgets"])}


class Run:
    """One run over the missing cells."""

    def __init__(self, bench: Bench, grid: Grid, path: Path, results: Results, done: Callable[[], None]):
        self.bench, self.grid, self.path, self.results, self.done = bench, grid, path, results, done

    def all(self, missing: Sequence[Key]) -> None:
        """Policies that need no text share one dense pass; each calibrated one comes after, with a dense pass of its own."""
        methods = list(dict.fromkeys(key.method for key in missing))
        ready = {method: made for method in methods if (made := self._tried(method, self._policy, method)) is not None}
        free = {method: policy for method, policy in ready.items() if not policy.calibrated}
        plan = self.bench.plan
        for method, policy in free.items():
            plan = self._tried(method, add_tables, plan, policy, self.bench.model) or plan
        seen = self._dense(plan, free)
        for method in free:
            self._method(method, plan, missing, seen.get(method))
        for method in (m for m in ready if m not in free):
            self._calibrated(method, ready[method], missing)

    def _policy(self, method: str) -> Policy:
        return self.grid.policy(method, self.grid.gains[0])

    def _calibrated(self, method: str, policy: Policy, missing: Sequence[Key]) -> None:
        text = self.bench.calibration or self.bench.windows
        plan = self._tried(method, prepare, self.bench.plan, policy, self.bench.model, text)
        if plan is not None:
            self._method(method, plan, missing, self._dense(plan, {method: policy}).get(method))

    def _tried(self, method: str, step: Callable[..., T], *arguments: Any) -> T | None:
        """`step(…)`; where this model or text has no such thing, the reason goes into the results."""
        try:
            return step(*arguments)
        except AceError as error:
            self.results["refused"][method] = {"budgets": list(self.grid.budgets), "reason": str(error)}
            return None

    def _dense(self, plan: Plan, policies: Mapping[str, Policy]) -> dict[str, Histogram]:
        attachable = {m: p for m, p in policies.items() if self._tried(m, self._attachable, plan, p) is not None}
        voices = {m: p for m, p in attachable.items() if by_quantile(p)}
        if not voices and "dense" in self.results:
            return {}
        start = time.perf_counter()
        dense, seen = dense_pass(replace(self.bench, plan=plan), voices)
        if "dense" not in self.results:
            self._describe(plan, dense, time.perf_counter() - start)
        return seen

    def _describe(self, plan: Plan, dense: Score, seconds: float) -> None:
        bench, one_each = self.bench, by_expert(plan)
        self.results["dense"] = {**_measured(dense), "seconds": seconds}
        self.results["tables"] = {
            key: {name: [round(v, 5) for v in table.tolist()] for name, table in layer.items()}
            for key, layer in one_each.items()
        }
        self.results["oracle"] = table_correlation(bench.model, one_each, bench.windows, bench.batch, bench.tick)
        write_json(self.path, self.results)

    def _method(self, method: str, plan: Plan, missing: Sequence[Key], dense: Histogram | None) -> None:
        keys = [key for key in missing if key.method == method]
        for gain in dict.fromkeys(key.gain for key in keys):
            ace = self._tried(method, lambda g: self._attachable(plan, self.grid.policy(method, g)), gain)
            if ace is None:
                continue
            with ace(self.bench.model):
                passes = Recorder(ace, self.bench)
                for key in (k for k in keys if k.gain == gain):
                    self._try(key, passes, dense)
                    self.done()

    def _try(self, key: Key, passes: Recorder, dense: Histogram | None) -> None:
        try:
            self._cell(key, passes, dense)
        except AceError as error:
            refused = self.results["refused"].setdefault(key.method, {"budgets": [], "reason": str(error)})
            refused["budgets"] = sorted({*refused["budgets"], key.budget})

    def _cell(self, key: Key, passes: Recorder, dense: Histogram | None) -> None:
        start, before = time.perf_counter(), passes.count
        check_budget(key.budget, passes.ace.top_k, passes.ace.policy.min_active)
        found = fit(passes, key.budget, dense, self._near(key), self.grid.correct)
        outcome = passes.outcome(found.threshold)
        cell = key._asdict() | self._numbers(found, outcome, key.budget == self.grid.detail)
        cell |= {"passes": passes.count - before, "seconds": time.perf_counter() - start}
        self.results["cells"].append(cell)
        write_json(self.path, self.results)

    def _numbers(self, found: Fit, outcome: Outcome, detail: bool) -> Results:
        if not math.isfinite(sum(outcome.score.nll)):
            raise ModelError(f"The model gives no numbers (NaN) at τ = {found.threshold:g}.")
        change = perplexity_change(outcome.score, score_of(self.results["dense"]))
        return {
            **_measured(outcome.score),
            "change": asdict(change),
            "threshold": found.threshold,
            "realised": outcome.realised,
            "layers": outcome.layers,
            **({"experts": outcome.experts} if detail else {}),
        }

    def _attachable(self, plan: Plan, policy: Policy) -> ACE:
        if lacking := plan.lacks(policy.needs):
            raise PlanError(missing_table(policy.name, lacking[0], policy.calibrated))
        return self.bench.attachable(policy, plan)

    def _near(self, key: Key) -> Near | None:
        """What the same method and budget had under another gain: gains move hidden states, and with them ratios, little."""
        cells = self.results["cells"]
        same = [c for c in cells if (c["method"], c["budget"]) == (key.method, key.budget)]
        return Near(same[-1]["threshold"], same[-1]["realised"]) if same else None


def _measured(score: Score) -> Results:
    interval = perplexity_interval(score)
    return {
        "perplexity": score.perplexity,
        "interval": [interval.low, interval.high],
        "nll": score.nll,
        "targets": score.targets,
    }


# ---- reading results ----------------------------------------------------------------------------------------------


def score_of(entry: Results) -> Score:
    """The score a cell or the dense model was stored with."""
    return Score(entry["nll"], entry["targets"])


def cell_at(results: Results, method: str, gain: str, budget: float) -> Results | None:
    found = (c for c in results["cells"] if (c["method"], c["gain"], c["budget"]) == (method, gain, budget))
    return next(found, None)


def against(results: Results, rival: str) -> list[Results]:
    """Each cell's paired change of perplexity against the rival's at the same gain and budget."""
    if rival not in results["grid"]["methods"]:
        raise OptionError(f"{rival!r} is not in these results. Choose one of: {', '.join(results['grid']['methods'])}.")
    rows = []
    for cell in results["cells"]:
        other = cell_at(results, rival, cell["gain"], cell["budget"])
        if other is not None and cell["method"] != rival:
            change = perplexity_change(score_of(cell), score_of(other))
            rows.append({k: cell[k] for k in ("method", "gain", "budget")} | {"rival": rival, **asdict(change)})
    return rows
