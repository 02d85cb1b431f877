"""What is wrong in the `ace` part of a configuration is said by the front end, before an engine and its workers start."""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...decider.settings import check_tables
from ...plan.hub import load_plan
from ...tables import TABLES
from . import KEY
from .settings import Settings, unknown_vllm
from .skipping import CONFIGURED, plain_torch


def check_early(wrong: Exception | None = None) -> None:
    """Put the check in front of vLLM's own making of a configuration, once. `wrong`: why this vLLM could not be hooked."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        made = EngineArgs.create_engine_config
    except (ImportError, AttributeError):  # a help alone
        return
    if getattr(made, "checks_ace", False):
        return

    @wraps(made)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self.additional_config, wrong)
        return made(self, *args, **kwargs)

    create.checks_ace = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create


def check(additional: Any, wrong: Exception | None = None) -> None:
    """Settings, plan, policy and budget; that the plan is this model's is seen when its layers are built."""
    given = additional.get(KEY, CONFIGURED) if isinstance(additional, dict) else CONFIGURED
    if given == CONFIGURED:
        return
    if wrong is not None:
        raise unknown_vllm(wrong) from wrong
    settings = Settings.from_dict(given)
    settings.chosen()
    if settings.plan is None:
        return  # it is made by the worker that comes first
    with plain_torch():
        plan = load_plan(settings.plan)
        policy = settings.chosen(plan)
        check_tables(plan, policy, set(TABLES))
        settings.check_budgets(plan, policy)
