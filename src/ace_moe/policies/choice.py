"""The policy that is meant: one that is named, or what a plan says is best for its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError, PolicyError
from ..plan import Plan, pick
from ..plan.entries import without_denominator
from .base import COMMON, Policy
from .registry import AUTO, choose, is_ours, make


def policy_for(
    plan: Plan,
    policy: str | Policy = AUTO,
    preset: str | None = None,
    workload: str | None = None,
    served: bool = False,
    **settings: Any,
) -> Policy:
    """The policy that is named. `auto`: the plan's recommendation, else that of its newest thresholds (on the text
    `workload`), else the gate share. `served`: only one that every engine can run."""
    own = _of_plan(plan, served, workload) if policy == AUTO and preset is None else None
    return choose(policy, preset, **settings) if own is None else make(_rebuilt(own), **settings)


def _of_plan(plan: Plan, served: bool, workload: str | None) -> Mapping[str, Any] | None:
    recommendation = plan.recommendation or {}
    settings = (recommendation.get("served") if served else None) or recommendation.get("settings")
    if settings is not None:
        return settings
    sha256 = None if workload is None else pick(plan.workloads, workload).sha256
    newest_first = [t.settings for t in reversed(plan.thresholds) if sha256 in (None, t.workload.sha256)]
    return next((known for known in newest_first if not served or _rebuilt(known).by_token), None)


def _rebuilt(settings: Mapping[str, Any]) -> Policy:
    """The policy of settings as a plan keeps them. A file may not say which code runs: built-in policies alone."""
    name = settings.get("policy") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or not is_ours(name):
        raise PlanError(
            f"The plan's own choice is policy {name!r:.80}, which is not built in. Name the policy you want (--policy)."
        )
    try:
        common = {key: settings[key] for key in COMMON if key in settings}
        return make(name, **{**without_denominator(settings.get("params", {})), **common})
    except (PolicyError, TypeError, ValueError) as error:
        raise PlanError(
            f"The plan's own choice cannot be used: {error} Name the policy you want (--policy), or run `ace tune` again."
        ) from error
