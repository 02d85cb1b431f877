"""The most that may be skipped within a bound on KL."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from ..errors import BudgetError
from ..plan import Plan
from ..policies import Policy
from ..text import Windows
from .passes import judge
from .recipe import map_budgets

COARSE, FINE = 0.05, 0.01


def most_within(
    model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, kl: float, batch: int = 1
) -> tuple[float, Plan]:
    """(the largest budget, in hundredths, whose KL on this text is at most `kl`; the plan with the text's curve).

    KL rises with the budget: steps of 5 points find where it passes the bound, steps of one point the place. No model is
    trained or corrected for it; the threshold of each budget comes from the curve of one pass.
    """
    if policy.mapping != "quantile":
        raise BudgetError(f"A bound on KL needs a policy with a curve of thresholds; {policy.key!r} is searched for.")
    plan = map_budgets(model, plan, policy, windows, [], batch=batch).plan
    curve = plan.curve(policy.settings, windows.workload.sha256)
    assert curve is not None
    limit = min(curve.limit, (plan.top_k - policy.min_active) / plan.top_k)  # by the safeguards, on this text

    def last_within(budgets: Sequence[float], otherwise: float) -> float:
        """The last of rising budgets before the first that is not within the bound."""
        taus = [curve.threshold(budget) for budget in budgets]  # as they are mapped, whatever was measured before
        for budget, fidelity in zip(budgets, judge(model, plan, policy, windows, taus, batch), strict=True):
            if fidelity["kl"]["value"] > kl:
                break
            otherwise = budget
        return otherwise

    rough = last_within(_steps(COARSE, limit, COARSE), 0.0)
    return last_within(_steps(rough + FINE, min(limit, rough + COARSE - FINE), FINE), rough), plan


def _steps(start: float, stop: float, step: float) -> list[float]:
    count = math.floor((stop - start) / step + 1e-6) + 1
    return [round(start + i * step, 2) for i in range(max(0, count))]
