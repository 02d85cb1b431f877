"""What the front end does before an engine and its workers start: check the `ace` part, and settle which plan all will read."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

from ...plan.hub import located
from ...tables.build import automatic_plan_path, check_tables
from . import KEY
from .settings import Settings, file_hash, unknown_vllm
from .skipping import CONFIGURED


def install(wrong: Exception | None = None) -> None:
    """Put the check around vLLM's own making of a configuration, once. `wrong`: why this vLLM could not be hooked.

    Every front end makes its configuration by `EngineArgs.create_engine_config`, and starts its engine with what that returns.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs

        stock = EngineArgs.create_engine_config
    except (ImportError, AttributeError):  # a help alone
        return
    if getattr(stock, "checks_ace", False):
        return

    @wraps(stock)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = check(self.additional_config, wrong)
        config = stock(self, *args, **kwargs)
        if settings is not None:
            config.additional_config = agreed(config.additional_config, settings, config.model_config.model)
        return config

    create.checks_ace = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create


def check(additional: Any, wrong: Exception | None = None) -> Settings | None:
    """The settings, with the hash of the plan that they name; None without ACE. Settings, plan, policy and budget are checked;
    that the plan is this model's is seen when its layers are built."""
    given = additional.get(KEY, CONFIGURED) if isinstance(additional, dict) else CONFIGURED
    if given == CONFIGURED:
        return None
    if wrong is not None:
        raise unknown_vllm(wrong) from wrong
    settings = Settings.from_dict(given)
    settings.chosen()
    if settings.plan is None:
        return settings
    path = located(settings.plan).absolute()
    settings = replace(settings, plan=str(path), plan_sha256=settings.plan_sha256 or file_hash(path))
    _check_plan(settings, str(path))
    return settings


def agreed(additional: dict[str, Any], settings: Settings, model: str) -> dict[str, Any]:
    """vLLM's additional_config with the path and the hash of the plan, for the engine core and its workers."""
    if settings.plan is None:
        settings.read(model)
        path = automatic_plan_path(model)[0].absolute()
        settings = replace(settings, plan=str(path), plan_sha256=file_hash(path))
        _check_plan(settings, model)
    return {**additional, KEY: {**additional[KEY], "plan": settings.plan, "plan_sha256": settings.plan_sha256}}


def _check_plan(settings: Settings, model: str) -> None:
    plan = settings.read(model)
    policy = settings.chosen(plan)
    check_tables(plan, policy)
    settings.check_budgets(plan, policy)
