"""Skipping in vLLM: a plugin that vLLM finds by its entry point and that does nothing until it is configured.

    ace serve Qwen/Qwen3-30B-A3B --plan plan.safetensors --skip 0.5 --port 8000

    llm = LLM("Qwen/Qwen3-30B-A3B", **engine_args("plan.safetensors", skip=0.5))

This module imports nothing of vLLM, so that installing the package costs a vLLM user without ACE nothing; an error while
it is imported would only be logged by vLLM, and the server would run on without skipping.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...budget import Budget, BudgetLike

KEY = "ace"  # in vLLM's additional_config
WORKER = "ace_moe.engines.vllm.control.AceWorker"
MIDDLEWARE = "ace_moe.engines.vllm.http.AceMiddleware"


def register() -> None:
    """Hook into vLLM, which calls this in the front end, the engine and every worker.

    A vLLM that is not asked to skip runs on, whatever of it we do not find; one that is asked to is told: vLLM does not catch
    an error here, and it would end also who never heard of skipping.
    """
    from . import preflight

    try:
        from . import controller, requests
        from .layers import register_layers

        register_layers()
        requests.listen()
        controller.listen()
    except Exception as error:
        preflight.install(error)
    else:
        preflight.install()


def engine_args(plan: str | Path | None = None, skip: BudgetLike = 0.0, **settings: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` or `EngineArgs` that switch skipping on. `plan` is a file or a plan of the hub, as owner/name;
    settings are those of the server (`Settings`) and the policy's own."""
    from ...plan.hub import located
    from .settings import Settings

    path = {} if plan is None else {"plan": str(located(plan).absolute())}
    ace = {**path, "skip": Budget.parse(skip).to_json(), **settings}
    Settings.from_dict(ace).chosen()
    return {"additional_config": {KEY: ace}, "worker_extension_cls": WORKER}
