"""Make what is missing: tables that a policy reads → one dense pass → corrections or search → thresholds.

The one home of it: `ACE`, `ace plan`, `ace run`, `ace serve`, the demo and comparisons call `ensure` or `map_budgets`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache

from transformers import PreTrainedModel

from .. import progress
from ..budget import check_budget
from ..decider import Deciders
from ..errors import BudgetError
from ..plan import Lookup, Plan, Threshold
from ..policies import PRESETS, Policy
from ..scoring.predictions import predicts
from ..tables.build import add_tables
from ..text import Windows
from .fit import BINS, Dense, Fit, Histogram, curve_of, quantile_fits
from .passes import Passes, Run, attached, judge, read_through
from .texts import TextSource
from .unfinished import Partial

COARSE = 5e-3  # a quantile further than this from its budget lies on a step
SEARCHED = 2e-3  # how close a search comes to a budget before it ends
MOST_STEPS = 10
MOST_CORRECTIONS = 6
Save = Callable[[Plan], object]


def missing(
    plan: Plan, policy: Policy, budgets: Iterable[float], workload: str | None = None, sha256: str | None = None
) -> list[float]:
    """The budgets above 0 that the plan has no threshold for: any at all, or one measured on the text with this hash."""
    lookup = Lookup(plan, policy.settings, workload)

    def known(budget: float) -> bool:
        if sha256 is not None:
            entries = [t for t in plan.thresholds if t.workload.sha256 == sha256 and t.fits(policy.settings)]
            return any(abs(t.budget - budget) < 1e-9 for t in entries)
        with suppress(BudgetError):
            lookup.at(budget)
            return True
        return False

    return [budget for budget in sorted(set(budgets) - {0.0}) if not known(budget)]


def ensure(
    model: PreTrainedModel,
    plan: Plan,
    policy: Policy,
    budgets: Iterable[float],
    text: TextSource,
    *,
    workload: str | None = None,
    deciders: Deciders | None = None,
    save: Save = lambda plan: None,
) -> Plan:
    """The plan with everything this policy needs to run at these budgets; nothing is done twice.

    `deciders`: of a plan that is attached to the model already, else one is attached for the passes. `save` gets the plan after
    each threshold, so that stopped work goes on.
    """
    windows = None if text.text is None else text.windows(model)  # a text of its own is written only if it is needed
    todo = missing(plan, policy, budgets, workload, None if windows is None else windows.workload.sha256)
    if todo:
        windows = windows or text.windows(model)
        return map_budgets(model, plan, policy, windows, todo, deciders=deciders, save=save).plan
    if plan.lacks(policy.tables):
        plan = add_tables(plan, policy.tables, model)
        save(plan)
    return plan


# ---- mapping ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mapped:
    """What mapping left: the plan, its entries and fits for the budgets that were asked, and the passes."""

    plan: Plan
    fits: list[Fit]
    passes: Passes

    @property
    def entries(self) -> list[Threshold]:
        of = {t.budget: t for t in self.plan.thresholds if _of(t, self.passes.policy, self.passes.windows)}
        return [of[fit.budget] for fit in self.fits]


def map_budgets(
    model: PreTrainedModel,
    plan: Plan,
    policy: Policy,
    windows: Windows,
    budgets: Sequence[object],
    *,
    batch: int = 1,
    correct: bool | None = None,
    again: bool = False,
    run: Run = read_through,
    judged: bool = False,
    save: Save = lambda plan: None,
    partial: Partial | None = None,
    deciders: Deciders | None = None,
) -> Mapped:
    """τ for each budget on this text, into the plan; `save` gets the plan after each, so that a stopped run goes on.

    `correct`: move τ until the skipped model itself realises the budget; by default for all but the paper's method,
    which has no such step. `judged`: entries also say what their threshold does to predictions. Budgets that the plan has
    for these settings and this text are not mapped `again`. Tables from weights are made; one that a calibration makes has to be
    in the plan (`ace_moe.lab.policies.prepare`). `deciders`: of a plan attached already; else one is attached here.
    """
    wanted = list(dict.fromkeys(check_budget(b, plan.top_k, policy.min_active) for b in budgets))
    correct = policy != PRESETS["paper"] if correct is None else correct
    plan = add_tables(plan, policy.tables, model)
    known = {} if again else {b: f for b in wanted if (f := known_fit(plan, policy, windows, b, correct)) is not None}
    with (
        nullcontext(deciders) if deciders is not None else attached(model, plan, policy) as deciders,
        partial or nullcontext(),
    ):
        passes, fits = Passes(deciders, model, windows, batch, run), dict(known)
        todo = [b for b in wanted if b not in known]
        plan, dense = _dense(passes, plan, partial, again)
        with progress.task("budgets", len(todo)) as task:
            for budget in todo:
                fits[budget] = fit_budgets(passes, [budget], correct=correct, dense=dense)[0]
                plan = plan.with_thresholds(entries([fits[budget]], policy, windows))
                save(plan)
                task.advance()
    if judged:
        plan = _judged(passes, plan, [fits[b] for b in wanted])
    return Mapped(plan, [fits[b] for b in wanted], passes)


def _judged(passes: Passes, plan: Plan, fits: Sequence[Fit]) -> Plan:
    """The entries with what their thresholds do to the model's predictions, where that is not known yet."""
    model, policy, windows = passes.model, passes.policy, passes.windows
    known = {t.budget for t in plan.thresholds if t.fidelity and _of(t, policy, windows)}
    todo = [fit for fit in fits if fit.budget not in known]
    if not todo or not predicts(model):
        return plan
    found = judge(model, plan, policy, windows, [fit.threshold for fit in todo], passes.batch)
    made = [replace(t, fidelity=f) for t, f in zip(entries(todo, policy, windows), found, strict=True)]
    return plan.with_thresholds(made)


def _of(entry: Threshold, policy: Policy, windows: Windows) -> bool:
    """Whether an entry is of these settings and this text."""
    same = entry.fits(policy.settings) and entry.workload.sha256 == windows.workload.sha256
    return same and entry.phase == "both"


def _dense(passes: Passes, plan: Plan, partial: Partial | None, again: bool) -> tuple[Plan, Dense | None]:
    """What the unskipped model says of every budget: the histogram of a run that was stopped, else the plan's curve, else by
    a pass; and the plan with the curve of it."""
    policy, workload = passes.policy, passes.windows.workload
    if policy.mapping != "quantile":
        return plan, None
    known = None if again else plan.curve(policy.settings, workload.sha256)
    found = None if partial is None else partial.load(passes)
    if found is None and known is not None:
        return plan, known
    if found is None:
        found = passes(0.0)
        if partial is not None:
            partial.save(passes, found)
    return plan.with_curve(curve_of(found, policy, workload)), found


def known_fit(plan: Plan, policy: Policy, windows: Windows, budget: float, correct: bool) -> Fit | None:
    """What an earlier run found for this budget, settings and text."""
    corrected = correct or policy.mapping == "search"
    for t in plan.thresholds:
        if _of(t, policy, windows) and t.corrected == corrected and abs(t.budget - budget) < 1e-9:
            return Fit(t.budget, t.threshold, t.realised, t.passes, t.corrected)
    return None


def corrected_fit(run: Callable[[float], Histogram], fit: Fit, tolerance: float = 5e-4, max_passes: int = 6) -> Fit:
    """Move τ until the skipped model itself realises the budget; the best of at most `max_passes` passes.

    Each pass is the skipped model's own histogram: its quantile is the next τ. States move little with τ, so this
    fixed-point step converges in one or two passes.
    """
    if fit.budget == 0:
        return fit
    tau, best = fit.threshold, None
    for done in range(1, max_passes + 1):
        seen = run(tau)
        realised = seen.ratio(tau)
        if best is None or abs(realised - fit.budget) < abs(best.realised - fit.budget):
            best = Fit(fit.budget, tau, realised, done, corrected=True)
        if abs(realised - fit.budget) <= tolerance:
            break
        tau = seen.threshold(fit.budget)
    assert best is not None
    return replace(best, passes=done)


def search(run: Callable[[float], Histogram], budget: float, tolerance: float = 5e-4, max_passes: int = 24) -> Fit:
    """Binary search over τ with a pass of the skipped model at each step: what quantile mapping is compared with."""
    return bisect(lambda tau: run(tau).ratio(tau), budget, tolerance, max_passes)


def bisect(realised: Callable[[float], float], budget: float, tolerance: float, max_passes: int) -> Fit:
    """The τ in [0, 1] whose realised ratio comes closest to the budget."""
    low, high = 0.0, 1.0
    best = Fit(budget, 0.0, 0.0, 0, corrected=True)
    for done in range(1, max_passes + 1):
        tau = math.ceil((low + high) / 2 * BINS) / BINS
        found = realised(tau)
        if abs(found - budget) <= abs(best.realised - budget):
            best = Fit(budget, tau, found, done, corrected=True)
        if abs(found - budget) <= tolerance or high - low <= 1 / BINS:
            break
        low, high = (tau, high) if found < budget else (low, tau)
    return replace(best, passes=done)


def fit_budgets(
    passes: Passes, budgets: Sequence[float], *, correct: bool = True, dense: Dense | None = None
) -> list[Fit]:
    """One dense pass maps every budget; then, if asked, correction passes of the skipped model for each.

    Policies without contributions are searched instead, with a pass of the skipped model at each step.
    """
    if passes.policy.mapping == "search":
        return search_budgets(passes, budgets)
    fits = quantile_fits(dense if dense is not None else passes(0.0), budgets)
    if not correct:
        return fits
    # slots of equal contribution cannot be split: such a budget is measured once, no correction brings it closer
    most = [1 if abs(fit.realised - fit.budget) > COARSE else MOST_CORRECTIONS for fit in fits]
    return [corrected_fit(passes, fit, max_passes=n) for fit, n in zip(fits, most, strict=True)]


def search_budgets(passes: Passes, budgets: Sequence[float]) -> list[Fit]:
    """Binary search for each budget; a pass at a threshold that was tried before is not made again."""
    realised = cache(lambda tau: passes(tau).ratio(tau) if tau else 0.0)
    fits = []
    for wanted in budgets:
        before, most = passes.count, realised(1.0)
        if wanted > most + SEARCHED:
            raise BudgetError(
                f"A budget of {wanted:.1%} cannot be met by policy {passes.policy.key!r}: on this text it skips at most "
                f"{most:.1%} of the slots, because {passes.policy.limits}."
            )
        if abs(realised(wanted) - wanted) <= SEARCHED:  # some knobs are the ratio itself
            fit = Fit(wanted, wanted, realised(wanted), 0, corrected=True)
        else:
            fit = bisect(realised, wanted, SEARCHED, MOST_STEPS)
        fits.append(replace(fit, passes=passes.count - before))
    return fits


def entries(fits: Sequence[Fit], policy: Policy, windows: Windows) -> list[Threshold]:
    """Fits as a plan keeps them."""
    return [Threshold(**policy.settings, **vars(fit), workload=windows.workload) for fit in fits]
