"""The controller's loop against simulated steps: it settles within its bounds, does not swing, and comes back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ace_moe.engines.vllm.controller import WINDOW, TimeController, timed
from ace_moe.engines.vllm.settings import Settings
from ace_moe.errors import OptionError


def run(controller: TimeController, base: float, steps: int, gain: float = 0.5, noise: float = 0.03) -> list[float]:
    """Budgets over steps whose time is base · (1 − gain · budget), with noise and now and then a long prompt."""
    g, found = random.Random(0), []
    for n in range(steps):
        slow = 5 if n % 20 == 19 else 1
        controller.step(base * (1 - gain * controller.budget) * slow * (1 + g.uniform(-noise, noise)))
        found.append(controller.budget)
    return found


@pytest.mark.parametrize("gain", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("base", [0.01, 0.028, 0.033, 0.036, 0.2])
def test_it_settles_and_comes_back(base: float, gain: float) -> None:
    controller = TimeController(0.3, 0.7, 0.025)
    found = run(controller, base, 60 * WINDOW, gain)
    assert all(0.3 <= b <= 0.7 for b in found)
    assert len(set(found[-20 * WINDOW :])) == 1, "it swings"
    if base * (1 - 0.3 * gain) > 0.026:
        fast_enough = base * (1 - gain * found[-1]) < 0.026
        assert found[-1] == 0.7 or fast_enough
    if base * (1 - 0.3 * gain) < 0.024:
        assert found[-1] == 0.3
    assert run(controller, 0.01, 20 * WINDOW, gain)[-1] == 0.3


def test_a_long_prompt_is_no_load() -> None:
    controller = TimeController(0.3, 0.7, 0.025)
    assert [controller.step(0.5 if n % 3 == 0 else 0.02) for n in range(4 * WINDOW)] == [None] * 4 * WINDOW


def test_settings_make_it() -> None:
    assert TimeController.of(None) is None and TimeController.of(Settings()) is None
    made = TimeController.of(Settings.from_dict({"skip": 0.3, "skip_max": 0.7, "target_tpot": 25}))
    assert made is not None and (made.low, made.high, made.target) == (0.3, 0.7, 0.025)


@pytest.mark.parametrize(
    "given",
    [
        {"skip_max": 0.5}, {"target_tpot": 20}, {"skip": 0.6, "skip_max": 0.5, "target_tpot": 20},
        {"skip_max": 0.5, "target_tpot": 0}, {"skip_max": 1.0, "target_tpot": 5}, {"skip_max": True, "target_tpot": 5},
        {"skip": {"prefill": 0, "decode": 0.3}, "skip_max": 0.5, "target_tpot": 5},
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(given: dict) -> None:
    with pytest.raises(OptionError, match="skip-max"):
        Settings.from_dict(given)


class Core:
    """An engine core that is never fast enough, and whose workers refuse what is above a limit."""

    def __init__(self, limit: float):
        ace = {"skip": 0.3, "skip_max": 0.5, "target_tpot": 1e-6}
        self.vllm_config = SimpleNamespace(additional_config={"ace": ace})
        self.scheduler = SimpleNamespace(has_unfinished_requests=lambda: True)
        self.model_executor = SimpleNamespace(collective_rpc=self.rpc)
        self.limit, self.asked = limit, []  # type: ignore[var-annotated]

    def rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, str]]:
        self.asked.append(kwargs["skip"])
        return [{"error": "no threshold"} if kwargs["skip"] > self.limit else {}]

    @timed
    def step(self) -> tuple[dict[int, str], bool]:
        return {0: "output"}, True


@pytest.mark.parametrize(("limit", "asked"), [(1.0, [0.35, 0.4, 0.45, 0.5]), (0.4, [0.35, 0.4, 0.45]), (0.0, [0.35])])
def test_a_budget_the_workers_refuse_ends_it(limit: float, asked: list[float]) -> None:
    """Or it would believe that it moved."""
    core = Core(limit)
    for _ in range(8 * WINDOW):
        core.step()
    assert core.asked == asked
