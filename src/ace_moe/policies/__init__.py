"""Policies: methods that decide slots, by name."""

from __future__ import annotations

from typing import Any

from ..errors import BudgetError
from .ace import Ace
from .base import Decision, Policy, Routing, TokenPolicy, parameters_of
from .single import Gsp, Rcr, Share

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (Ace, Gsp, Rcr, Share)}
PRESETS: dict[str, Policy] = {"paper": Ace(fusion="max", gain="kept", min_active=1, min_mass=0.0)}


def make(policy: str | Policy = "ace", **settings: Any) -> Policy:
    """A policy by name or an instance, with the settings that are given."""
    if isinstance(policy, Policy):
        return make(policy.name, **{**policy.own_settings, **settings})
    if policy not in POLICIES:
        raise BudgetError(f"There is no policy {policy!r}. Choose one of: {', '.join(POLICIES)}.")
    cls = POLICIES[policy]
    unknown = sorted(set(settings) - set(parameters_of(cls)))
    if unknown:
        raise BudgetError(
            f"Policy {policy!r} has no setting {', '.join(unknown)}. It has: {', '.join(parameters_of(cls))}."
        )
    return cls(**settings)


__all__ = ["POLICIES", "PRESETS", "Ace", "Decision", "Gsp", "Policy", "Rcr", "Routing", "Share", "TokenPolicy", "make"]
