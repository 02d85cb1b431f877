"""A plan file with everything a command needs of it: made where there is none, mapped where a threshold is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .common import made_of
from .outputs import check_writable
from .terminal import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..plan import Plan
    from ..policies import Policy


def mapped_plan(
    model: str,
    path: Path | None,
    policy_of: Callable[[Plan], Policy],
    budgets: Sequence[float],
    *,
    load: Callable[[str], PreTrainedModel],
    text: Path | None = None,
    workload: str | None = None,
    allow_other_weights: bool = False,
) -> tuple[Path, str | None]:
    """(the plan file with tables and thresholds for these budgets, the text whose thresholds to take).

    `load` is called only if a pass of the model is needed. Without a path, the plan that is kept for this model is used.
    """
    from ..budget import check_budget
    from ..checkpoint import MoEModel
    from ..mapping import TextSource, ensure, missing
    from ..plan import Plan, labels, update
    from ..provenance import provenance
    from ..tables.build import add_tables, automatic_plan, automatic_plan_path, check_tables
    from ..text import Text

    if path is None:
        automatic_plan(model, say=lambda message: note(message.removeprefix("ACE: ")))
        path = automatic_plan_path(model)[0]
    path = path.expanduser().absolute()
    plan = known = Plan.load(path)
    policy = policy_of(plan)
    check_tables(plan, policy)
    source = TextSource(model, None if text is None else Text.of(text))
    sha256 = source.sha256()
    wanted = [check_budget(budget, plan.top_k, policy.min_active) for budget in budgets]
    todo = missing(plan, policy, wanted, workload, sha256) if workload is None or text is not None else []
    if todo or plan.lacks(policy.tables):
        check_writable(path)
        plan = plan.check_model(MoEModel.open(model).fingerprint(), allow_other_weights)
        plan = add_tables(plan, policy.tables, model)
        update(path, known, plan)
    if todo:
        note(f"mapping {', '.join(f'{b:.0%}' for b in todo)} on {text or 'text that the model writes itself'}")
        loaded = load(model)
        plan = replace(plan, made=(*plan.made, provenance(loaded.device, made_of(text))))
        plan = ensure(loaded, plan, policy, todo, source, save=lambda mapped: update(path, known, mapped))
    return path, workload if sha256 is None else labels(plan.workloads).get(sha256)
