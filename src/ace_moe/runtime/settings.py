"""From what a user asks to what the rule uses: a plan, a policy and a budget become τ by phase."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import BudgetError, PlanError
from ..plan import Plan, missing_table
from ..policies import Policy
from .rows import PHASES

Skip = float | Mapping[str, float]
FULL = '{"prefill": 0.3, "decode": 0.5}'
HOST: Any = {"dtype": torch.float32, "device": "cpu"}  # an engine may build its layers under other defaults


def thresholds(plan: Plan, policy: Policy, skip: Skip, workload: str | None = None) -> Tensor:
    """τ for prefill, decode and verify, [3]."""
    if not isinstance(skip, Mapping):
        return torch.full((len(PHASES),), _look_up(plan, policy, skip, "both", workload), **HOST)
    wanted = by_phase(skip)
    entries = {"verify": "verify" if "verify" in skip else "decode"}  # verify follows decode unless it is named
    return torch.tensor([_look_up(plan, policy, b, entries.get(p, p), workload) for p, b in wanted.items()], **HOST)


def _look_up(plan: Plan, policy: Policy, budget: object, phase: str, workload: str | None) -> float:
    value = check_budget(budget, plan.top_k, policy.min_active)
    tau, notice = plan.threshold(policy.settings, value, phase, workload)  # type: ignore[arg-type]
    if notice:
        warnings.warn(notice, stacklevel=4)
    return tau


def by_phase(skip: Skip) -> dict[str, float]:
    """One budget for all phases, or a mapping that names prefill and decode; verify follows decode unless it is named."""
    if not isinstance(skip, Mapping):
        return dict.fromkeys(PHASES, skip)
    if set(skip) == {"both"}:
        return dict.fromkeys(PHASES, skip["both"])
    unknown = sorted(str(k) for k in set(skip) - set(PHASES))
    if unknown or not {"prefill", "decode"} <= set(skip):
        said = f"it has {', '.join(unknown)}" if unknown else f"it names {', '.join(skip) or 'none'} alone"
        raise BudgetError(f"Budgets by phase name prefill and decode (and verify, if it differs): {FULL}; {said}.")
    return {phase: skip.get(phase, skip["decode"]) for phase in PHASES}


def check_budget(budget: object, top_k: int, min_active: int = 1) -> float:
    """A budget as a number the rule can meet, or an error that names the limit."""
    try:
        value = float(budget)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise BudgetError(
            f"A budget is the fraction of routed slots to skip, such as 0.5; {budget!r} is no number."
        ) from None
    if not math.isfinite(value) or not 0 <= value < 1:
        raise BudgetError(
            f"A budget is a fraction from 0 to less than 1 of the routed slots, such as 0.5; not {budget!r}."
        )
    limit = max(0, top_k - min_active) / top_k
    if value > limit:
        raise BudgetError(
            f"A budget of {value:.1%} cannot be met: with {top_k} slots a token and {min_active} always kept, at most "
            f"{limit:.1%} can be skipped. Lower the budget or min_active."
        )
    return value


def check_threshold(threshold: object) -> Tensor:
    """τ for all phases, or [prefill, decode] or [prefill, decode, verify] → [3]."""
    try:
        if isinstance(threshold, bool):
            raise TypeError
        value = torch.as_tensor(threshold, dtype=torch.float32).cpu()
        if value.shape == (2,):
            value = torch.cat([value, value[1:]])
        value = value.expand(len(PHASES)).clone()
    except (TypeError, ValueError, RuntimeError):
        value = torch.full((len(PHASES),), -1.0)
    if not (value >= 0).all() or not value.isfinite().all():
        raise BudgetError(
            f"A threshold is a number from 0 on, or one for prefill and one for decode; not {threshold!r}."
        )
    return value


def check_tables(plan: Plan, policy: Policy, from_weights: set[str], calibrates: bool = False) -> None:
    """Whether the policy can have its tables: those from weights are made when a model is attached, others need a text."""
    for name in plan.lacks(policy.tables):
        if name in plan.undefined:
            raise PlanError(
                f"Policy {policy.key!r} needs the table {name}, which this model has none of: {plan.undefined[name]} "
                "Policy 'share' needs no table."
            )
        if name not in from_weights and not calibrates:
            raise PlanError(missing_table(policy.key, name, policy.calibrated))
