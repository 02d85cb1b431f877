"""Methods × budgets × gains on one model and one text, into one JSON file that a later run continues.

Every cell is written as soon as it is measured: a kill loses the cell that was running and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ... import progress
from ...budget import check_budget
from ...checkpoint import MoEModel
from ...errors import AceError, ModelError, PlanError
from ...mapping.fit import Histogram
from ...mapping.passes import attached, observe
from ...mapping.recipe import fit_budgets
from ...plan import Plan, missing_table
from ...policies import Policy
from ...scoring.losses import Losses, perplexity_change, perplexity_interval
from ...scoring.predictions import score
from ...scoring.statistics import token_interval
from ...tables.build import add_tables
from ..store import COMPARE, Results, ResultsFile, begin_run, put
from .grid import Grid, Key, needs_text, parse_method
from .oracle import by_expert, table_correlation
from .subject import Recorder, Subject, by_quantile, identity_of
from .verdict import losses_of

PROTOCOL = "windows, each by itself"
DETAIL = 0.5  # cells of this budget keep ratios by expert; for all budgets the file would be mostly that
ORACLES = ("oracle", "oracle:raw")  # they read the output of every expert
MEASURES = ("kl", "agreement", "acceptance")


def compare(subject: Subject, grid: Grid, path: Path, facts: Results) -> Results:
    """Measure every cell that is not in the file yet. `facts` are written beside the numbers."""
    fingerprint = MoEModel.of(subject.model).fingerprint()
    subject.plan.check_model(fingerprint)
    identity = {
        **identity_of(subject.model, fingerprint),
        "protocol": PROTOCOL,
        "text": subject.windows.workload.sha256,
        "calibration": subject.calibration.workload.sha256 if subject.calibration else None,
        "window": subject.windows.ids.shape[1],
        "batch": subject.batch,  # changes rounding, and what methods that decide by batch see
        "safeguards": grid.safeguards,
        "correct": grid.correct,
    }
    file = ResultsFile(path, COMPARE, identity)
    known, keys = file.read(), list(grid)
    measured = {tuple(cell[name] for name in Key._fields) for cell in known.get("cells", ())}
    missing = [key for key in keys if key not in measured]
    if missing or "dense" not in known:
        dense = losses_of(known["dense"]) if "dense" in known else None
        with progress.task("cells", len(keys), done=len(keys) - len(missing)) as task:
            Run(subject, grid, file, facts, missing, dense, task).measure()
    return file.read()


class Run:
    """One run over the missing cells of a file."""

    def __init__(
        self,
        subject: Subject,
        grid: Grid,
        file: ResultsFile,
        facts: Results,
        missing: Sequence[Key],
        dense: Losses | None,
        task: progress.Task,
    ):
        self.subject, self.grid, self.file, self.facts = subject, grid, file, facts
        self.missing, self.dense, self.task = missing, dense, task
        self.refused: dict[str, Results] = {}
        self.number: int | None = None  # of this run in the file, from its first write on

    def measure(self) -> None:
        """Policies that need no text share one dense pass; each calibrated one comes after, with a dense pass of its own."""
        plan, model = self.subject.plan, self.subject.model
        free: dict[str, Policy] = {}
        with_text: dict[str, Policy] = {}
        for method in dict.fromkeys(key.method for key in self.missing):
            with self._refusals(method):
                policy = self.grid.policy(method, self.grid.gains_of(method)[0])
                if needs_text(policy):
                    with_text[method] = policy
                    continue
                plan = add_tables(plan, policy.tables, model)
                if lacking := plan.lacks(policy.tables):
                    raise PlanError(missing_table(policy.key, lacking[0]))
                free[method] = policy
        contributions = self._dense(plan, free)
        for method in free:
            self._method(method, plan, contributions.get(method))
        for method, policy in with_text.items():
            from ..policies import prepare  # with every method of the lab

            with self._refusals(method):
                own = prepare(self.subject.plan, policy, model, self.subject.calibration or self.subject.windows)
                self._method(method, own, self._dense(own, {method: policy}).get(method))
        with self._changed():
            pass  # what was refused since the last cell

    def _dense(self, plan: Plan, policies: Mapping[str, Policy]) -> dict[str, Histogram]:
        """Read the text once with the unskipped model: what the slots of each policy contribute; and its own losses, with what
        tables know of its experts, unless the file has them."""
        subject, start = self.subject, time.perf_counter()
        watchers = {method: policy for method, policy in policies.items() if by_quantile(policy)}
        if not watchers and self.dense is not None:
            return {}
        read = partial(score, subject.model, subject.windows, subject.batch, keep=subject.reference)
        losses, contributions = observe(subject.model, plan, watchers, read)
        if self.dense is None:
            self.dense, tables = losses, by_expert(plan)
            dense = {**_perplexity(losses), "seconds": time.perf_counter() - start}
            correlation = table_correlation(subject.model, tables, subject.windows, subject.batch)
            rounded = {
                key: {name: [round(v, 5) for v in table.tolist()] for name, table in layer.items()}
                for key, layer in tables.items()
            }
            with self._changed() as results:
                results |= {"dense": dense, "tables": rounded, "oracle": correlation}
        return contributions

    def _method(self, method: str, plan: Plan, dense: Histogram | None) -> None:
        keys = [key for key in self.missing if key.method == method]
        for gain in dict.fromkeys(key.gain for key in keys):
            with (
                self._refusals(method),
                attached(self.subject.model, plan, self.grid.policy(method, gain)) as deciders,
            ):
                passes = Recorder(deciders, self.subject)
                for key in (key for key in keys if key.gain == gain):
                    with self._refusals(method, [key.budget]):
                        self._cell(key, passes, dense)
                    self.task.advance()

    def _cell(self, key: Key, passes: Recorder, dense: Histogram | None) -> None:
        """Measure one cell. Nothing of another goes into it: τ starts from the dense curve, whatever another gain has found."""
        start, before = time.perf_counter(), len(passes.asked)
        check_budget(key.budget, self.subject.plan.top_k, passes.policy.min_active)
        fit = fit_budgets(passes, [key.budget], correct=self.grid.correct, dense=dense)[0]
        outcome = passes.outcome(fit.threshold)
        losses, fidelity = outcome.losses, outcome.losses.fidelity
        if not math.isfinite(sum(losses.nll)):
            raise ModelError(f"The model gives no numbers (NaN) at τ = {fit.threshold:g}.")
        assert self.dense is not None
        cell: Results = {**key._asdict(), **_perplexity(losses)}
        if fidelity is not None:  # means over tokens; KL by window too, so that two cells can be compared in pairs
            for name in MEASURES:
                cell[name] = asdict(token_interval(getattr(fidelity, name), losses.by_window))
            cell["kl_by_window"] = fidelity.kl
        cell |= {
            "change": asdict(perplexity_change(losses, self.dense)),
            "threshold": fit.threshold,
            "realised": outcome.realised,
            "layers": outcome.layers,
            **({"experts": outcome.experts} if abs(key.budget - DETAIL) < 1e-9 else {}),
            "passes": len(set(passes.asked[before:])),
            "seconds": time.perf_counter() - start,
        }
        with self._changed() as results:
            put(results["cells"], cell | {"run": self.number}, Key._fields)

    @contextmanager
    def _refusals(self, method: str, budgets: Sequence[float] = ()) -> Iterator[None]:
        """Turn an error of ours into the reason why these budgets of the method, or all, have no cell; the others go on."""
        try:
            yield
        except AceError as error:
            refused = self.refused.setdefault(method, {"budgets": [], "reason": str(error)})
            refused["budgets"] = sorted({*refused["budgets"], *(budgets or self.grid.budgets_of(method))})

    @contextmanager
    def _changed(self) -> Iterator[Results]:
        """Yield the results with this run's facts and refusals in them, to be changed and written."""
        with self.file.changed() as results:
            for name in ("cells", "refused"):
                results.setdefault(name, [] if name == "cells" else {})
            if self.number is None:
                self._begin(results)
            for method, why in self.refused.items():
                earlier = results["refused"].get(method, {"budgets": []})["budgets"]
                results["refused"][method] = why | {"budgets": sorted({*earlier, *why["budgets"]})}
            yield results

    def _begin(self, results: Results) -> None:
        """Put this run, its facts and its grid into the file; what is tried again is not refused any more."""
        self.number = begin_run(results, self.facts)
        grid = results.get("grid", {"methods": [], "budgets": [], "gains": []})
        keys = list(self.grid)
        budgets = sorted({*grid["budgets"], *(key.budget for key in keys)})
        gains = list(dict.fromkeys([*grid["gains"], *(key.gain for key in keys)]))
        methods = list(dict.fromkeys([*grid["methods"], *self.grid.methods]))
        results["grid"] = {"methods": methods, "budgets": budgets, "gains": gains}
        # these look at every expert's output: they save nothing and show what a perfect score could reach
        results["references"] = [method for method in methods if parse_method(method)[0] in ORACLES]
        results["servable"] = results.get("servable", {}) | self.grid.servable()
        for method in self.grid.methods:
            if refused := results["refused"].pop(method, None):
                again = {key.budget for key in self.missing if key.method == method}
                if left := [budget for budget in refused["budgets"] if budget not in again]:
                    results["refused"][method] = refused | {"budgets": left}


def _perplexity(losses: Losses) -> Results:
    bounds = perplexity_interval(losses)
    return {
        "perplexity": losses.perplexity,
        "interval": [bounds.low, bounds.high],
        "nll": losses.nll,
        "targets": losses.targets,
    }
