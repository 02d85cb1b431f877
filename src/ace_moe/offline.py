"""The offline side end to end: checkpoint → tables → plan, and a model with a text → thresholds in the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import budget
from .ace import ACE
from .budget import Fit, Histogram
from .checkpoint import MoELayer, MoEModel
from .errors import BudgetError, StructureError
from .plan import Plan, Threshold
from .policies import Policy
from .scoring import Score, score
from .tables import TABLES, tables
from .text import Windows

Tick = Callable[[], None]
COARSE = 5e-3  # a quantile further than this from its budget lies on a step
SEARCHED = 2e-3  # how close a search comes to a budget before it ends
MOST_STEPS = 10
MOST_CORRECTIONS = 6
CALIBRATED_ON = 8  # windows


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


def add_tables(plan: Plan, policy: Policy, model: str | Path | PreTrainedModel | MoEModel) -> Plan:
    """The plan with the tables from weights alone that this policy needs and the plan does not have."""
    names = [name for name in plan.lacks(policy.needs) if name in TABLES]
    if not names:
        return plan
    moe = _moe(model)
    plan.check_model(moe.fingerprint())
    found: dict[str, dict[str, Tensor]] = {}
    for site in moe.sites:
        found[site.key], missing = tables(moe.layer(site), names)
        if missing:
            raise StructureError(" ".join(missing.values()))
    return plan.with_tables(found)


def calibrate(plan: Plan, policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Plan:
    """The plan with the policy's calibration on this model and text, made again if it is there already."""
    if not policy.calibrated:
        return plan
    plan.check_model(MoEModel.of(model).fingerprint())
    text = asdict(windows.workload) if windows is not None else None
    return plan.with_tables(policy.calibrate(model, windows), {"params": policy.params, "workload": text})


def calibration_part(windows: Windows) -> Windows:
    """The first windows of a text: the cited methods use few samples, and some take a pass for every layer or expert."""
    ids = windows.ids[:CALIBRATED_ON]
    digest = hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()
    return Windows(ids, replace(windows.workload, sha256=digest, tokens=ids.numel()))


def prepare(plan: Plan, policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Plan:
    """The plan with everything the policy needs: what it lacks is computed or calibrated, the rest is left alone."""
    plan = add_tables(plan, policy, model)
    return calibrate(plan, policy, model, windows) if plan.lacks(policy.needs) else plan


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
        seen = Histogram() if self.ace.policy.mapping == "quantile" else None
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
        return Counted(self.ace.realised) if seen is None else seen


class Counted(Histogram):
    """The ratio that one pass realised, from the counters: for policies that have no contributions to look at."""

    def __init__(self, realised: float):
        self.realised = realised

    def ratio(self, threshold: float) -> float:
        return self.realised


def fit_budgets(
    passes: Passes, budgets: Sequence[float], *, correct: bool = True, dense: Histogram | None = None
) -> list[Fit]:
    """One dense pass maps every budget; then, if asked, correction passes of the skipped model for each.

    Policies without contributions are searched instead, with a pass of the skipped model at each step.
    """
    if passes.ace.policy.mapping == "search":
        return search_budgets(passes, budgets)
    fits = budget.map_budgets(dense if dense is not None else passes(0.0), budgets)
    return [budget.correct(passes, fit, max_passes=_corrections(fit)) for fit in fits] if correct else fits


def _corrections(fit: Fit) -> int:
    """Slots of equal contribution cannot be split: such a budget is measured once, no correction brings it closer."""
    return 1 if abs(fit.realised - fit.budget) > COARSE else MOST_CORRECTIONS


def search_budgets(passes: Passes, budgets: Sequence[float]) -> list[Fit]:
    """Binary search for each budget; a pass at a threshold that was tried before is not made again."""
    tried: dict[float, float] = {0.0: 0.0}

    def run(tau: float) -> Histogram:
        if tau not in tried:
            tried[tau] = passes(tau).ratio(tau)
        return Counted(tried[tau])

    fits = []
    for wanted in budgets:
        before = passes.count
        _check_reachable(passes.ace.policy, wanted, run(1.0).ratio(1.0))
        close = abs(run(wanted).ratio(wanted) - wanted) <= SEARCHED  # some knobs are the ratio itself
        fit = (
            Fit(wanted, wanted, tried[wanted], 0, corrected=True)
            if close
            else budget.search(run, wanted, SEARCHED, max_passes=MOST_STEPS)
        )
        fits.append(replace(fit, passes=passes.count - before))
    return fits


def _check_reachable(policy: Policy, wanted: float, most: float) -> None:
    if wanted > most + SEARCHED:
        raise BudgetError(
            f"A budget of {wanted:.1%} cannot be met by policy {policy.name!r}: on this text it skips at most {most:.1%} of "
            f"the slots, because {policy.limits}."
        )


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
