"""Models, plans and references of the serving tests. Everything that starts an engine is skipped where vLLM is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from serving_cases import Case, in_a_gap, load_fp32, prompts, save_tiny
from serving_parts import vllm_config

from ace_moe import build_plan
from ace_moe.demo import MODEL
from ace_moe.engines.vllm import skipping
from ace_moe.mapping import map_budgets
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.text import Windows

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # its quantised checkpoints are served here
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_VLLM:
        return
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(
                pytest.mark.skip(reason="vLLM is not installed; `make test-vllm` sets up an environment with it")
            )


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """demo, glm4 or qwen2."""

    @cache
    def make(name: str) -> Case:
        folder = tmp_path_factory.mktemp(name)
        model = MODEL if name == "demo" else save_tiny(name, folder / "model")
        plan = build_plan(model)
        return Case(name, model, plan.save(folder / "plan.safetensors"), in_a_gap(load_fp32(model), plan, prompts()))

    return make


@pytest.fixture(scope="session")
def mapped(demo_plan: Plan, demo_model: Any, demo_windows: Windows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's plan with thresholds for 20, 50 and 60 % by the default policy, which `case_of` has too."""
    plan = map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.2, 0.5, 0.6]).plan
    return plan.save(tmp_path_factory.mktemp("mapped") / "plan.safetensors")


@pytest.fixture
def configured(demo_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that makes a stand-in for vLLM's configuration in which skipping is configured with the demo's plan."""
    monkeypatch.setattr(skipping, "listen", lambda find: None)
    path = demo_plan.save(tmp_path / "plan.safetensors")

    def make(**ace: Any) -> Any:
        config = vllm_config(**{"plan": path, **ace})
        assert skipping.configure(config) is not None
        return config

    return make
