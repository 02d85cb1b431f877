"""The valve's loop against simulated steps: it settles within its bounds, does not swing, and comes back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from ace_moe.engines.vllm.settings import Settings
from ace_moe.engines.vllm.valve import WINDOW, Valve, _tick, valve_for
from ace_moe.errors import OptionError


def run(valve: Valve, base: float, steps: int, gain: float = 0.5, noise: float = 0.03, seed: int = 0) -> list[float]:
    """Budgets over steps whose time is base · (1 − gain · budget), with noise and now and then a long prompt."""
    g, found = random.Random(seed), []
    for n in range(steps):
        slow = 5 if n % 20 == 19 else 1
        valve.step(base * (1 - gain * valve.budget) * slow * (1 + g.uniform(-noise, noise)))
        found.append(valve.budget)
    return found


@pytest.mark.parametrize("gain", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("base", [0.01, 0.028, 0.033, 0.036, 0.2])
def test_it_settles_and_comes_back(base: float, gain: float) -> None:
    valve = Valve(0.3, 0.7, 0.025)
    found = run(valve, base, 60 * WINDOW, gain)
    assert all(0.3 <= b <= 0.7 for b in found)
    assert len(set(found[-20 * WINDOW :])) == 1, "it swings"
    if base * (1 - 0.3 * gain) > 0.026:
        fast_enough = base * (1 - gain * found[-1]) < 0.026
        assert found[-1] == 0.7 or fast_enough
    if base * (1 - 0.3 * gain) < 0.024:
        assert found[-1] == 0.3
    assert run(valve, 0.01, 20 * WINDOW, gain)[-1] == 0.3


def test_a_long_prompt_is_no_load() -> None:
    valve = Valve(0.3, 0.7, 0.025)
    assert [valve.step(0.5 if n % 3 == 0 else 0.02) for n in range(4 * WINDOW)] == [None] * 4 * WINDOW


def test_settings_make_it() -> None:
    assert valve_for(None) is None and valve_for(Settings()) is None
    made = valve_for(Settings.from_dict({"skip": 0.3, "skip_max": 0.7, "target_tpot": 25}))
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


def test_a_budget_the_workers_refuse_ends_it() -> None:
    """Or it would believe that it moved."""
    asked: list[float] = []

    def rpc(method: str, kwargs: dict) -> list[dict]:
        asked.append(kwargs["skip"])
        return [{"error": "no threshold"}]

    scheduler = SimpleNamespace(has_unfinished_requests=lambda: True)
    core = SimpleNamespace(scheduler=scheduler, model_executor=SimpleNamespace(collective_rpc=rpc))
    core._ace_valve_found, core._ace_last = Valve(0.3, 0.7, 1e-9), 0.0
    for _ in range(WINDOW):
        _tick(core, core._ace_valve_found, True)
    assert asked == [0.35] and core._ace_valve_found is None
