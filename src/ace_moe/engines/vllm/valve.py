"""Graceful degradation: the budget rises while steps are slower than wanted and falls again when load does.

    ace serve MODEL --skip 0.3 --skip-max 0.7 --target-tpot 25

Decided in the engine core, from the time between two steps' results, and given to all workers between two steps, so that
ranks never disagree. The prefix cache is not divided by budget while the valve moves it: what is cached was computed
somewhere between the two bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from .settings import Settings, logger, settings_of

STEP = 0.05  # of the budget, at a time
WINDOW = 32  # steps that are looked at together
RELAX = 0.85  # of the target: below it the budget may fall
MARK = "_ace_valve"


class Valve:
    """`step(seconds)` after each step → another budget, or None. Moves by STEP, at most once in WINDOW steps."""

    def __init__(self, low: float, high: float, target: float):
        self.low, self.high, self.target, self.budget = low, high, target, low
        self._times: list[float] = []

    def step(self, seconds: float) -> float | None:
        self._times.append(seconds)
        if len(self._times) < WINDOW:
            return None
        middle = sorted(self._times)[WINDOW // 2]  # one long prompt among the steps is no load
        self._times = []
        wanted = self._wanted(middle)
        if wanted == self.budget:
            return None
        self.budget = wanted
        return wanted

    def _wanted(self, seconds: float) -> float:
        """Up where steps are too slow; down only where they are much faster: a rise must not undo itself."""
        if seconds > self.target:
            return min(self.high, round(self.budget + STEP, 2))
        if seconds < RELAX * self.target:
            return max(self.low, round(self.budget - STEP, 2))
        return self.budget


# ---- in the engine core ---------------------------------------------------------------------------------------------


def listen() -> None:
    from vllm.v1.engine.core import EngineCore

    if MARK not in vars(EngineCore):
        for name in ("step", "step_with_batch_queue"):
            setattr(EngineCore, name, _timed(getattr(EngineCore, name)))
        setattr(EngineCore, MARK, True)


def _timed(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        valve = _valve_of(self)
        if valve is not None:
            _tick(self, valve, bool(found[0]))
        return found

    return step


def _valve_of(core: Any) -> Valve | None:
    """The valve of an engine that was asked for one; looked up once."""
    if "_ace_valve_found" not in vars(core):
        core._ace_valve_found = valve_for(settings_of(core.vllm_config))
    return core._ace_valve_found


def valve_for(settings: Settings | None) -> Valve | None:
    if settings is None or settings.skip_max is None:
        return None
    low, target = settings.skip, settings.target_tpot  # checked: one budget, and a time
    return Valve(float(low), float(settings.skip_max), float(target) / 1000)  # type: ignore[arg-type]


def _tick(core: Any, valve: Valve, results: bool) -> None:
    """Time between two steps' results, while there is work."""
    now, before = time.perf_counter(), vars(core).get("_ace_last")
    if results:
        core._ace_last = now if core.scheduler.has_unfinished_requests() else None
        if before is not None and (budget := valve.step(now - before)) is not None:
            # not by the core's own, which begins an epoch of the prefix cache
            replies = core.model_executor.collective_rpc("ace_set", kwargs={"skip": budget})
            if refused := [reply["error"] for reply in replies if "error" in reply]:
                core._ace_valve_found = None
                logger.error("ACE: the budget stays where it is under load: %s", refused[0])
