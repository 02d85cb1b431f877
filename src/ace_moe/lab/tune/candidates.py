"""What `ace tune` tries: token policies that the kernels can run, and what may be changed around each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...budget import check_budget
from ...errors import AceError
from ...plan import Plan
from ...policies import Share, TokenPolicy, make
from ...tables.build import check_tables

SCORES = ("share", "share:squared=true", "top_p", "top_p:squared=true", "relative", "fixed", "gsp", "rcr", "ace")
GAINS = ("none", "kept", "0.95", "1.05", "1.1")
FLOORS = (2, 3)
BASELINE = Share(gain="power")


def key_of(policy: TokenPolicy) -> str:
    """What tells candidates apart, in any run."""
    return json.dumps(policy.settings, sort_keys=True)


def shape_of(policy: TokenPolicy) -> TokenPolicy:
    """The candidate without what shapes no contribution: thresholds of the dense model are the same."""
    return replace(policy, gain="none")


def label(policy: TokenPolicy) -> str:
    """ "top_p squared, power, factor branch, floor 2"."""
    changed = {n: v for n, v in policy.params.items() if v != getattr(type(policy), n)}
    parts = [
        " ".join([policy.key, *(n if v is True else f"{n}={v}" for n, v in changed.items())]),
        _called(policy.gain),
    ]
    parts += [_called(policy.factor)] if policy.factor else []
    parts += [f"floor {policy.min_active}"] if policy.min_active > 1 else []
    return ", ".join(parts)


def _called(table: str) -> str:
    """A table's name without the mark of its text; another gain is as it is."""
    return re.sub(r"_[0-9a-f]{8}$", "", table).replace("_", " ")


def usable(plan: Plan, policy: TokenPolicy, budgets: Sequence[float]) -> bool:
    """Whether the model has the tables and the safeguards leave room."""
    try:
        check_tables(plan, policy)
        for budget in budgets:
            check_budget(budget, plan.top_k, policy.min_active)
    except AceError:
        return False
    return policy.kernel_rule() is not None


def scores() -> list[TokenPolicy]:
    """Each score with the gain that is best almost everywhere."""
    return [made for name in SCORES if isinstance(made := make(name, gain="power"), TokenPolicy)]


def varied(best: Sequence[TokenPolicy], setting: str, values: Iterable[Any]) -> list[TokenPolicy]:
    """Each of the best with each value of one setting: another gain, layer factor or floor."""
    return [replace(policy, **{setting: value}) for policy in best for value in values]
