"""How far a copy of a model is from its original: its tables, its routers, its experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import MoEModel
from ..errors import PlanError
from ..plan import Plan
from .build import build_plan


def plan_of(target: str) -> Plan:
    """A plan file as it is; a model's tables computed."""
    if Path(target).is_file() and not target.endswith(".gguf"):
        return Plan.load(target)
    return build_plan(MoEModel.open(target))


def compared(plan: Plan, other: Plan) -> dict[str, Any]:
    """By layer and table: mean and largest relative change from `other`, and the correlation of ranks."""
    mine, theirs = plan.fingerprint, other.fingerprint
    if plan.tables.keys() != other.tables.keys():
        raise PlanError(
            f"The two are not one architecture: {mine.difference(theirs)}. Compare a copy with its original."
        )
    both = {key: (layer, other.tables[key]) for key, layer in plan.tables.items()}
    layers = {key: {n: _change(a[n], b[n]) for n in a if n in b} for key, (a, b) in both.items()}
    same = mine.same_routers(theirs)
    apart = mine.difference(theirs) or "other values: a plan of one is not a plan of the other"
    return {
        "model": plan.model,
        "other": other.model,
        "same_routers": same,
        "difference": "" if same else apart,
        "experts": theirs.experts_notice(mine),
        "layers": layers,
    }


def _change(mine: Tensor, other: Tensor) -> dict[str, float]:
    if mine.shape != other.shape:
        raise PlanError("The two have other numbers of experts. Compare a copy with its original.")
    change = ((mine - other) / other.abs().clamp(min=1e-12)).abs()
    ranks = torch.stack([v.flatten().argsort().argsort().double() for v in (mine, other)])
    order = torch.corrcoef(ranks)[0, 1] if ranks.shape[1] > 1 else torch.ones(())
    return {"mean": float(change.mean()), "worst": float(change.max()), "order": float(order)}
