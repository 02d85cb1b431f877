"""Whether a policy can have its tables, said before long work starts."""

from __future__ import annotations

from collections.abc import Container

from ..errors import PlanError
from ..plan import Plan, missing_table
from ..policies import Policy
from . import TABLES


def check_tables(plan: Plan, policy: Policy, calibrations: Container[str] = ()) -> None:
    """Refuse a policy whose tables are undefined for the plan's model, or made by a calibration that was not run.

    `calibrations`: tables that the caller is about to calibrate.
    """
    for name in plan.lacks(policy.tables):
        if name in plan.undefined:
            raise PlanError(
                f"Policy {policy.key!r} needs the table {name}, which this model does not have: {plan.undefined[name]} "
                "Policy 'share' needs no table."
            )
        if name not in TABLES and name not in calibrations:
            raise PlanError(missing_table(policy.key, name))
