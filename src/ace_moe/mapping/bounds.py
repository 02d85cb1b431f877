"""Budgets in other words: the most that may be skipped within a bound on KL, and what must be skipped to read fewer experts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import rule
from ..errors import BudgetError
from ..plan import Plan, labels
from ..policies import Decision, Policy, Routing, TokenPolicy
from ..scoring.predictions import predict
from ..text import Windows
from .passes import attached, judge
from .recipe import map_budgets

COARSE, FINE = 0.05, 0.01
MOST_TOKENS, DRAWS = 2048, 32  # of the text whose routing is looked at; random steps of each layer


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
    curve, limit = plan.curve(policy.settings, windows.workload.sha256), _limit(plan, policy, windows)
    assert curve is not None

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


def least_reading(
    model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, reads: float, tokens: int
) -> tuple[float, Plan]:
    """(the smallest budget, in hundredths, under which decode steps of `tokens` sequences read at most the part `reads` of the
    experts they would read unskipped; the plan with the text's curve).

    Steps are drawn from the text's own routing, one token of a window each, so the model runs once.
    """
    if not isinstance(policy, TokenPolicy) or policy.mapping != "quantile":
        raise BudgetError(f"A part of the experts needs a policy that decides token by token; {policy.key!r} does not.")
    plan = map_budgets(model, plan, policy, windows, []).plan
    limit, name = _limit(plan, policy, windows), labels(plan.workloads)[windows.workload.sha256]
    seen = _routings(model, plan, policy, windows)
    for budget in _steps(0.0, limit, FINE):
        tau = plan.lookup(policy.settings, budget, workload=name).threshold if budget else 0.0
        if _part_read(seen, tau, tokens) <= reads:
            return budget, plan
    raise BudgetError(
        f"At most {limit:.1%} can be skipped, and {tokens} sequences then still read {_part_read(seen, tau, tokens):.0%} of the "
        f"experts they need. Ask for more than {reads:.0%}, or for fewer sequences."
    )


def _limit(plan: Plan, policy: Policy, windows: Windows) -> float:
    """The most that the safeguards let be skipped on this text."""
    curve = plan.curve(policy.settings, windows.workload.sha256)
    assert curve is not None
    return min(curve.limit, (plan.top_k - policy.min_active) / plan.top_k)


def _routings(model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows) -> list[tuple[Tensor, Tensor]]:
    """ids and protected contributions [T, k] of every layer, unskipped."""
    found: list[tuple[Tensor, Tensor]] = []

    def seen(routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        assert protected is not None
        found.append((routing.ids.cpu(), protected.cpu()))

    with attached(model, plan, policy) as deciders, deciders.observed(lambda key: seen), torch.inference_mode():
        predict(model, windows.ids[:1, :MOST_TOKENS])
    return found


def _part_read(seen: Sequence[tuple[Tensor, Tensor]], tau: float, tokens: int) -> float:
    """Experts read over experts asked for, in the mean of random steps of so many tokens."""
    generator, read, asked = torch.Generator().manual_seed(0), 0, 0
    for ids, protected in seen:
        for _ in range(DRAWS):
            at = torch.randint(len(ids), (tokens,), generator=generator)
            read, asked = read + len(ids[at][rule.kept(protected[at], tau)].unique()), asked + len(ids[at].unique())
    return read / asked


def _steps(start: float, stop: float, step: float) -> list[float]:
    count = math.floor((stop - start) / step + 1e-6) + 1
    return [round(start + i * step, 2) for i in range(max(0, count))]
