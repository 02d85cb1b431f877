"""Candidates of `ace tune`: token policies that the kernels can run, and the settings to vary around each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...budget import check_budget
from ...decider.settings import check_tables
from ...errors import AceError
from ...plan import Plan
from ...policies import Share, TokenPolicy, make
from ...tables import TABLES

SCORES = ("share", "share:squared=true", "top_p", "top_p:squared=true", "relative", "fixed", "gsp", "rcr", "ace")
GAINS = ("none", "kept", "0.95", "1.05", "1.1")
FLOORS = (2, 3)
WITH_MEAN = ("none", "1.1")  # gains that are tried with the mean beside a candidate's own
BASELINE = Share(gain="power")


def key_of(policy: TokenPolicy) -> str:
    """A key that tells candidates apart, in any run."""
    return json.dumps(policy.settings, sort_keys=True)


def shape_of(policy: TokenPolicy) -> TokenPolicy:
    """The candidate without what shapes no contribution: thresholds of the dense model are the same."""
    return replace(policy, gain="none", compensate=None)


def label(policy: TokenPolicy) -> str:
    """ "top_p squared, power, factor branch, floor 2, mean"."""
    changed = {n: v for n, v in policy.params.items() if v != getattr(type(policy), n) and n != "compensate"}
    parts = [
        " ".join([policy.key, *(n if v is True else f"{n}={v}" for n, v in changed.items())]),
        _called(policy.gain),
    ]
    parts += [_called(policy.factor)] if policy.factor else []
    parts += [f"floor {policy.min_active}"] if policy.min_active > 1 else []
    return ", ".join([*parts, *([policy.compensate] if policy.compensate else [])])


def _called(table: str) -> str:
    """A table's name without the mark of its text; another gain is as it is."""
    return re.sub(r"_[0-9a-f]{8}$", "", table).replace("_", " ")


def usable(plan: Plan, policy: TokenPolicy, budgets: Sequence[float]) -> bool:
    """True if the model has the tables and the safeguards leave room."""
    try:
        check_tables(plan, policy, set(TABLES))
        for budget in budgets:
            check_budget(budget, plan.top_k, policy.min_active)
    except AceError:
        return False
    return policy.kernel_rule() is not None


def scores() -> list[TokenPolicy]:
    """Yield each score with the gain that is best almost everywhere."""
    return [made for name in SCORES if isinstance(made := make(name, gain="power"), TokenPolicy)]


def varied(best: Sequence[TokenPolicy], setting: str, values: Iterable[Any]) -> list[TokenPolicy]:
    """Yield each of the best with each value of one setting: another gain, layer factor, floor or repair."""
    return [replace(policy, **{setting: value}) for policy in best for value in values]


def means(best: Sequence[TokenPolicy]) -> Iterator[TokenPolicy]:
    """The mean of skipped experts; what it adds, a gain need not."""
    for policy in best:
        for gain in dict.fromkeys([policy.gain, *WITH_MEAN]):
            yield replace(policy, compensate="mean", gain=gain)
