"""The offline side end to end: checkpoint → tables → plan, and a model with a text → thresholds in the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import budget
from .ace import ACE
from .budget import Fit, Histogram
from .checkpoint import MoELayer, MoEModel
from .errors import StructureError
from .evaluate.perplexity import Score, score
from .plan import Plan, Threshold
from .policies import Policy
from .tables import tables
from .text import Windows

Tick = Callable[[], None]


def build_plan(
    model: str | Path | PreTrainedModel | MoEModel, *, device: str | None = None, tick: Tick = lambda: None
) -> Plan:
    """Tables of every MoE layer from weights alone; one layer is in memory at a time. `tick` follows each."""
    moe = _moe(model)
    found: dict[str, dict[str, Tensor]] = {}
    undefined: dict[str, str] = {}
    for site in moe.sites:
        found[site.key], missing = tables(_placed(moe.layer(site), device))
        undefined = missing | undefined
        tick()
    if len(undefined) == len(found[site.key]) + len(undefined):
        raise StructureError(" ".join(undefined.values()))
    # a table that one layer lacks is no table of the model
    kept = {key: {n: t for n, t in layer.items() if n not in undefined} for key, layer in found.items()}
    return Plan(tables=kept, fingerprint=moe.fingerprint(), model=moe.name, undefined=undefined)


def _placed(layer: MoELayer, device: str | None) -> MoELayer:
    """On the device that was asked for; else where its weights are."""
    return layer if device is None else layer.to(device)


def _moe(model: str | Path | PreTrainedModel | MoEModel) -> MoEModel:
    if isinstance(model, MoEModel):
        return model
    return MoEModel.of(model) if isinstance(model, PreTrainedModel) else MoEModel.open(model)


class Passes:
    """Passes of one model under one policy over one text; each returns what its slots contributed, and is scored."""

    def __init__(self, ace: ACE, model: PreTrainedModel, windows: Windows, batch: int = 1, tick: Tick = lambda: None):
        self.ace, self.model, self.windows, self.batch, self.tick = ace, model, windows, batch, tick
        self.scores: dict[float, Score] = {}
        self.count = 0

    def __call__(self, threshold: float) -> Histogram:
        """The model must have `ace` attached."""
        seen = Histogram()
        self.ace.set_threshold(threshold)
        self.ace.reset()
        for skipper in self.ace.skippers:
            skipper.observer = seen
        try:
            self.scores[threshold] = score(self.model, self.windows, self.batch, self.tick)
        finally:
            for skipper in self.ace.skippers:
                skipper.observer = None
        self.count += 1
        return seen


def fit_budgets(
    passes: Passes, budgets: Sequence[float], *, correct: bool = True, dense: Histogram | None = None
) -> list[Fit]:
    """One dense pass maps every budget; then, if asked, correction passes of the skipped model for each."""
    fits = budget.map_budgets(dense if dense is not None else passes(0.0), budgets)
    return [budget.correct(passes, fit) for fit in fits] if correct else fits


def thresholds(fits: Sequence[Fit], policy: Policy, windows: Windows) -> list[Threshold]:
    """Entries for a plan."""
    settings: dict[str, Any] = policy.settings
    return [
        Threshold(
            **settings,
            budget=fit.budget,
            threshold=fit.threshold,
            realised=fit.realised,
            corrected=fit.corrected,
            passes=fit.passes,
            workload=windows.workload,
        )
        for fit in fits
    ]
