"""A budget as thresholds: τ of each phase, looked up in a plan, and where the controller is to move it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..budget import PHASES, Budget
from ..errors import BudgetError
from ..plan import Answer, Plan
from ..policies import Policy
from .controller import Control
from .state import UNCONTROLLED

APART = "budgets differ by phase, and thresholds were measured with one for all: realised ratios may differ"
HOST: Any = {"dtype": torch.float32, "device": "cpu"}  # an engine may build its layers under other defaults


class Thresholds(NamedTuple):
    """τ for prefill, decode and verify, [3], and the ratios [3] that a controller moves it towards; None: it stays."""

    tau: Tensor
    targets: Tensor | None = None


def thresholds_for(
    plan: Plan, policy: Policy, budget: Budget, workload: str | None = None, control: Control = "fixed"
) -> Thresholds:
    """Look a checked budget up. Under `control="track"` a plan without thresholds will do: τ finds its place by itself."""
    if control == "track":
        targets = [value if value > 0 else UNCONTROLLED for value in budget.by_phase.values()]
        return Thresholds(_start(plan, policy, budget, workload), torch.tensor(targets, **HOST))
    answers = lookup_phases(plan, policy, budget, workload)
    for notice in dict.fromkeys(answer.notice for answer in answers if answer.notice):
        warnings.warn(notice, stacklevel=3)
    return Thresholds(torch.tensor([answer.threshold for answer in answers], **HOST))


def lookup_phases(plan: Plan, policy: Policy, budget: Budget, workload: str | None = None) -> list[Answer]:
    """What the plan says of the budget of each phase; no model runs.

    A threshold is measured with one budget for all phases: where they differ, it counts as not corrected.
    """
    if budget.uniform:
        return [plan.lookup(policy.settings, budget.decode, "both", workload)] * len(PHASES)
    phases = ["decode" if p == "verify" and budget.verify == budget.decode else p for p in PHASES]
    answers = [plan.lookup(policy.settings, budget.by_phase[p], p, workload) for p in phases]
    return [
        a if a.expected == 0 else replace(a, how="uncorrected", error=None, notice=a.notice or APART) for a in answers
    ]


def _start(plan: Plan, policy: Policy, budget: Budget, workload: str | None) -> Tensor:
    """Where τ starts to move, [3]: it matters for a few tokens only, so notices are not shown."""
    try:
        answers = lookup_phases(plan, policy, budget, workload)
        return torch.tensor([answer.threshold for answer in answers], **HOST)
    except BudgetError:
        return torch.tensor(
            [value / plan.top_k for value in budget.by_phase.values()], **HOST
        )  # flat gates share 1 / k


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
            f"A threshold is a number of at least 0, or one for prefill and one for decode; not {threshold!r}."
        )
    return value
