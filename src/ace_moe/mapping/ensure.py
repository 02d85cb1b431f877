"""Make what is missing: the tables a policy reads, and thresholds for the budgets that are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import BudgetError
from ..plan import Plan
from ..policies import Policy
from ..tables.build import add_tables
from .recipe import Save, map_budgets
from .text_source import TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..decider import Deciders


def missing(
    plan: Plan, policy: Policy, budgets: Iterable[float], workload: str | None = None, sha256: str | None = None
) -> list[float]:
    """The budgets above 0 that the plan has no threshold for: any at all, or one measured on the text with this hash."""

    def known(budget: float) -> bool:
        if sha256 is not None:
            entries = [t for t in plan.thresholds if t.workload.sha256 == sha256 and t.fits(policy.settings)]
            return any(abs(t.budget - budget) < 1e-9 for t in entries)
        with suppress(BudgetError):
            plan.lookup(policy.settings, budget, workload=workload)
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
    todo = missing(plan, policy, budgets, workload, text.sha256())
    if todo:
        return map_budgets(model, plan, policy, text.windows(model), todo, deciders=deciders, save=save).plan
    if plan.lacks(policy.tables):
        plan = add_tables(plan, policy.tables, model)
        save(plan)
    return plan
