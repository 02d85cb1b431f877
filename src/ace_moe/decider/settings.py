"""From what a user asks to what the rule uses: a plan, a policy and a budget become τ by phase."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..budget import check_budget
from ..errors import BudgetError, PlanError, PolicyError
from ..plan import Answer, Plan, missing_table, pick
from ..plan.shapes import aligned_tables
from ..policies import AUTO, POLICIES, Policy, choose, make
from ..policies.base import COMMON
from .rows import PHASES

Skip = float | Mapping[str, float]
FULL = '{"prefill": 0.3, "decode": 0.5}'
APART = "budgets differ by phase, and thresholds were measured with one for all: realised ratios may differ"
HOST: Any = {"dtype": torch.float32, "device": "cpu"}  # an engine may build its layers under other defaults


# ---- the policy ---------------------------------------------------------------------------------------------------------


def policy_for(
    plan: Plan,
    policy: str | Policy = AUTO,
    preset: str | None = None,
    workload: str | None = None,
    served: bool = False,
    **settings: Any,
) -> Policy:
    """The policy that is meant. `auto`: the plan's recommendation, else its newest thresholds' (of a text that is named),
    else the gate share. `served`: of what engines can run that decide token by token and repair nothing."""
    known = _recommended(plan, served, workload) if policy == AUTO and preset is None else None
    return choose(policy, preset, **settings) if known is None else _made(known, settings)


def _made(known: Mapping[str, Any], settings: Mapping[str, Any]) -> Policy:
    """The policy that a plan names, with these settings over its own."""
    name = known.get("policy") if isinstance(known, Mapping) else known
    if not isinstance(name, str) or name not in POLICIES:  # a file may not say which code is run
        raise PlanError(
            f"The plan's own choice is policy {name!r:.80}, which is none of this package. Name the policy you want (--policy)."
        )
    try:
        common = {key: known[key] for key in COMMON if key in known}
        own = make(name, **{**dict(known.get("params", {})), **common})
    except (PolicyError, TypeError, ValueError) as error:
        raise PlanError(
            f"The plan's own choice cannot be used: {error} Name the policy you want (--policy), or run `ace tune` again."
        ) from error
    return make(own, **settings)


def _recommended(plan: Plan, served: bool, workload: str | None) -> Mapping[str, Any] | None:
    found = plan.recommendation or {}
    settings = (found.get("served") if served else None) or found.get("settings")
    if settings is not None:
        return settings
    text = None if workload is None else pick(plan.workloads, workload).sha256
    newest = [t.settings for t in plan.thresholds if text in (None, t.workload.sha256)]
    return next((known for known in reversed(newest) if not served or _made(known, {}).servable), None)


# ---- budgets ------------------------------------------------------------------------------------------------------------


def thresholds(plan: Plan, policy: Policy, skip: Skip, workload: str | None = None) -> Tensor:
    """τ for prefill, decode and verify, [3]."""
    found = answers(plan, policy, skip, workload)
    for notice in dict.fromkeys(answer.notice for answer in found.values()):
        if notice:
            warnings.warn(notice, stacklevel=3)
    return torch.tensor([answer.threshold for answer in found.values()], **HOST)


def answers(plan: Plan, policy: Policy, skip: Skip, workload: str | None = None) -> dict[str, Answer]:
    """What the plan says of each phase's budget; no model is called.

    A threshold is measured with one budget for all phases: where they differ, it counts as not corrected.
    """
    wanted = {p: check_budget(b, plan.top_k, policy.min_active) for p, b in by_phase(skip).items()}
    if not isinstance(skip, Mapping):
        return dict.fromkeys(wanted, plan.lookup(policy.settings, wanted["decode"], "both", workload))
    entries = {"verify": "verify" if "verify" in skip else "decode"}  # verify follows decode unless it is named
    found = {p: plan.lookup(policy.settings, b, entries.get(p, p), workload) for p, b in wanted.items()}  # type: ignore[arg-type]
    if len(set(wanted.values())) == 1:
        return found
    skipping = {p: answer for p, answer in found.items() if answer.expected != 0}
    return found | {p: replace(a, how="uncorrected", error=None, notice=a.notice or APART) for p, a in skipping.items()}


def alignment(plan: Plan, policy: Policy, skip: Skip, workload: str | None = None) -> dict[str, Tensor]:
    """Scale and shift [2, d] by layer for a budget, where the policy has such; they belong to mapped budgets alone."""
    wanted = {b for b in by_phase(skip).values() if b != 0} if policy.aligned else set()
    if len(wanted) > 1:
        raise BudgetError("Under `aligned` phases have one budget, or 0: its statistics are of one τ.")
    if not wanted:
        return {}
    (budget,) = wanted
    answer = plan.lookup(policy.settings, budget, workload=workload)
    names = aligned_tables(policy.settings, budget, answer.workload.sha256 if answer.workload else "")
    if plan.lacks(names):
        known = sorted({t.budget for t in plan.thresholds if t.fits(policy.settings)})
        raise BudgetError(
            f"Under `aligned` a budget has statistics of its own, and {budget:g} has none on this text; mapped are "
            f"{', '.join(f'{b:g}' for b in known) or 'none'}. Map it with `ace budget … --gain aligned`, or leave aligned out."
        )
    return {key: torch.stack([layer[name] for name in names]) for key, layer in plan.tables.items()}


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


def number(budget: Any) -> float:
    """A budget as Python's own number: 0.3 of NumPy or torch in single precision is the 0.3 that was mapped."""
    return float(budget) if isinstance(budget, (int, float)) else round(float(budget), 6)


def plain(skip: Skip) -> Skip:
    """A budget that was checked, as reports and repr show it."""
    return {phase: number(b) for phase, b in skip.items()} if isinstance(skip, Mapping) else number(skip)


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
