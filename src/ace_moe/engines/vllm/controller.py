"""A controller of the budget under load: it rises while steps are slower than wanted and falls again when load does.

    ace serve MODEL --skip 0.3 --skip-max 0.7 --target-tpot 25

It decides in the engine core, from the time between two steps' results, and gives the budget to all workers between two
steps, so that ranks never disagree. (`track` moves τ towards a ratio instead, on the device and inside of CUDA graphs:
`decider.tracking`.) The prefix cache is not divided by budget while it moves: what is cached was computed somewhere between
the two bounds.
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
MARK = "_ace_controlled"


class TimeController:
    """Moves a budget between two bounds towards a time for each step (seconds), by STEP and at most once in WINDOW steps."""

    def __init__(self, low: float, high: float, target: float):
        self.low, self.high, self.target, self.budget = low, high, target, low
        self._times: list[float] = []

    @classmethod
    def of(cls, settings: Settings | None) -> TimeController | None:
        """The controller that the settings ask for."""
        if settings is None or settings.skip_max is None or settings.target_tpot is None:
            return None
        return cls(settings.skip.decode, settings.skip_max, settings.target_tpot / 1000)

    def step(self, seconds: float) -> float | None:
        """Note what a step took; returns another budget, or None.

        Up where steps are too slow; down only where they are much faster: a rise must not undo itself.
        """
        self._times.append(seconds)
        if len(self._times) < WINDOW:
            return None
        middle = sorted(self._times)[WINDOW // 2]  # one long prompt among the steps is no load
        self._times, before = [], self.budget
        if middle > self.target:
            self.budget = min(self.high, round(self.budget + STEP, 2))
        elif middle < RELAX * self.target:
            self.budget = max(self.low, round(self.budget - STEP, 2))
        return self.budget if self.budget != before else None


# ---- in the engine core ---------------------------------------------------------------------------------------------


def listen() -> None:
    """Time the engine core's steps, by either of the methods that its loop may call."""
    from vllm.v1.engine.core import EngineCore

    if MARK not in vars(EngineCore):
        for name in ("step", "step_with_batch_queue"):
            setattr(EngineCore, name, timed(getattr(EngineCore, name)))
        setattr(EngineCore, MARK, True)


def timed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A core's step that tells its controller, if it has one, the time between two steps' results while there is work."""

    @wraps(stock)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = stock(self, *args, **kwargs)
        if "ace_controller" not in vars(self):
            self.ace_controller = TimeController.of(settings_of(self.vllm_config))
        if self.ace_controller is not None and outputs[0]:
            now, before = time.perf_counter(), vars(self).get("_ace_last")
            self._ace_last = now if self.scheduler.has_unfinished_requests() else None
            budget = None if before is None else self.ace_controller.step(now - before)
            if budget is not None:
                _give(self, budget)
        return outputs

    return step


def _give(core: Any, budget: float) -> None:
    """Hand the budget to all workers; where they refuse it, it stays where it is from then on."""
    # not by the core's own `collective_rpc`, which begins an epoch of the prefix cache
    replies = core.model_executor.collective_rpc("ace_set", kwargs={"skip": budget})
    if refused := [reply["error"] for reply in replies if "error" in reply]:
        core.ace_controller = None
        logger.error("ACE: the budget stays where it is under load: %s", refused[0])
