"""A budget as thresholds: τ of each phase, looked up in a plan, and where the controller is to move it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..budget import PHASES, Budget
from ..errors import BudgetError, OptionError, PolicyError
from ..plan import Answer, Lookup
from ..policies import Policy, TokenPolicy
from .state import UNCONTROLLED

Control = Literal["fixed", "track"]
CONTROLS: tuple[Control, ...] = ("fixed", "track")
APART = "budgets differ by phase, and thresholds were measured with one for all: realised ratios may differ"
HOST: Any = {"dtype": torch.float32, "device": "cpu"}  # an engine may build its layers under other defaults


class Thresholds(NamedTuple):
    """τ for prefill, decode and verify, [3], and the ratios [3] that a controller moves it towards; None: it stays."""

    tau: Tensor
    targets: Tensor | None = None


def thresholds_for(lookup: Lookup, budget: Budget, control: Control = "fixed") -> Thresholds:
    """Look a checked budget up. Under `control="track"` a plan without thresholds will do: τ finds its place by itself."""
    if control == "track":
        targets = torch.tensor([value if value > 0 else UNCONTROLLED for value in budget], **HOST)
        return Thresholds(_start(lookup, budget), targets)
    answers = by_phase(lookup, budget)
    for notice in dict.fromkeys(answer.notice for answer in answers if answer.notice):
        warnings.warn(notice, stacklevel=3)
    return Thresholds(torch.tensor([answer.threshold for answer in answers], **HOST))


def by_phase(lookup: Lookup, budget: Budget) -> list[Answer]:
    """What the plan says of prefill, decode and verify; no model runs.

    A threshold is measured with one budget for all phases: where they differ, it counts as not corrected.
    """
    if budget.prefill == budget.decode == budget.verify:
        return [lookup.at(budget.decode)] * len(PHASES)
    prefill, decode = lookup.at(budget.prefill, "prefill"), lookup.at(budget.decode, "decode")
    verify = decode if budget.verify == budget.decode else lookup.at(budget.verify, "verify")
    return [
        a if a.expected == 0 else replace(a, how="uncorrected", error=None, notice=a.notice or APART)
        for a in (prefill, decode, verify)
    ]


def _start(lookup: Lookup, budget: Budget) -> Tensor:
    """Where τ starts to move, [3]: it matters for a few tokens only, so notices are not shown."""
    try:
        return torch.tensor([answer.threshold for answer in by_phase(lookup, budget)], **HOST)
    except BudgetError:
        return torch.tensor([value / lookup.plan.top_k for value in budget], **HOST)  # flat gates have shares of 1 / k


def check_control(control: object, policy: Policy) -> Control:
    if control not in CONTROLS:
        raise OptionError(f"control is one of {', '.join(CONTROLS)}, not {control!r}.")
    if control == "track" and not isinstance(policy, TokenPolicy):
        raise PolicyError(
            f"Thresholds move by themselves for policies that decide token by token; {policy.key!r} does not."
        )
    return control


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
