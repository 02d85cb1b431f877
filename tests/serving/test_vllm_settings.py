"""The plugin's settings: read from vLLM's arguments, batch sizes for our kernels, policies that cannot be served."""

from __future__ import annotations

import pytest

from ace_moe.errors import BudgetError
from ace_moe.integrations.vllm import engine_args
from ace_moe.integrations.vllm.settings import EVERY, Settings, check_policy
from ace_moe.policies import make


def test_engine_args() -> None:
    found = engine_args("plan.safetensors", {"prefill": 0.5}, gain="none")
    ace = found["additional_config"]["ace"]
    assert ace["plan"].startswith("/") and ace["skip"] == {"prefill": 0.5} and ace["gain"] == "none"
    settings = Settings.from_dict(ace)
    assert settings.policy_settings == {"gain": "none"} and settings.skip == {"prefill": 0.5}


def test_kernels_setting() -> None:
    assert Settings().kernel_tokens == Settings(kernels=True).kernel_tokens == EVERY
    assert Settings(kernels=False).kernel_tokens == 0
    assert [Settings(kernels=n).kernel_tokens for n in (1, 8)] == [1, 8]


def test_policies_that_decide_by_the_batch_are_refused() -> None:
    for name in ("ace", "gsp", "rcr", "share", "top_p"):
        check_policy(make(name))
    for name in ("oea", "xshare", "pesf", "oracle"):
        with pytest.raises(BudgetError, match=f"{name}' cannot be served"):
            check_policy(make(name))
