"""Checkpoint → plan: tables of every layer from weights alone, further tables, and the plan of a model that was given none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..checkpoint import MoEModel
from ..checkpoint.model import check_sizes
from ..errors import OutputError, PlanError, StructureError
from ..files import cache_folder
from ..plan import Plan
from . import TABLES, tables

MOST_KEPT = 64  # plans of models that were given none; each has under a few MiB
logger = logging.getLogger("vllm.ace_moe")  # what happens in an engine's worker is seen in its log


def build_plan(model: str | Path | PreTrainedModel | MoEModel, *, device: str | None = None) -> Plan:
    """Tables of every MoE layer from weights alone, computed on the device that is asked for, else where the weights are; one
    layer is in memory at a time."""
    moe = _moe(model)
    fingerprint = moe.fingerprint()
    check_sizes(fingerprint)
    found: dict[str, dict[str, Tensor]] = {}
    undefined: dict[str, str] = {}
    with progress.task("layers", len(moe)) as task:
        for site in moe.sites:
            layer = moe.layer(site)
            found[site.key], missing = tables(layer if device is None else layer.to(device))
            undefined = missing | undefined
            task.advance()
    return Plan(tables=whole_tables(found, undefined), fingerprint=fingerprint, model=moe.name, undefined=undefined)


def whole_tables(found: dict[str, dict[str, Tensor]], undefined: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """A table that one layer lacks is no table of the model; a model without any has no plan."""
    kept = {key: {n: t for n, t in layer.items() if n not in undefined} for key, layer in found.items()}
    if not any(kept.values()):
        raise StructureError(" ".join(undefined.values()))
    return kept


def add_tables(plan: Plan, wanted: Iterable[str], model: str | Path | PreTrainedModel | MoEModel) -> Plan:
    """The plan with those of the wanted tables that come from weights alone and that it does not have."""
    names = [name for name in plan.lacks(wanted) if name in TABLES]
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


def _moe(model: str | Path | PreTrainedModel | MoEModel) -> MoEModel:
    if isinstance(model, MoEModel):
        return model
    return MoEModel.of(model) if isinstance(model, PreTrainedModel) else MoEModel.open(model)


# ---- a plan when none is given ------------------------------------------------------------------------------------------


def automatic_plan_path(model: str | Path) -> tuple[Path, MoEModel]:
    moe = MoEModel.open(model)
    return cache_folder() / f"{moe.name}-{moe.content()[:16]}.safetensors", moe


def automatic_plan(model: str | Path, say: Callable[[str], None] = logger.warning) -> Plan:
    """The model's tables from the cache, or computed and kept there. One process computes, the others wait."""
    from filelock import FileLock

    path, moe = automatic_plan_path(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            kept = _kept(path, say)
            if kept is not None:
                say(f"ACE: no plan was given; using the one made earlier at {path}.")
                return kept
            say(f"ACE: no plan was given; computing the tables of {moe.name} ({len(moe)} layers) into {path}.")
            made = build_plan(moe)
            made.save(path)
            _forget_old(path)
            return made
    except OSError as error:
        raise OutputError(
            f"A plan could not be kept in {path.parent} ({error.strerror or error}). Make one with `ace tables {model} -o "
            "plan.safetensors` and name it with --plan, or set ACE_CACHE to a folder that can be written."
        ) from error


def _kept(path: Path, say: Callable[[str], None]) -> Plan | None:
    """The plan that is kept there; None if there is none, or none that can be read any more."""
    if not path.exists():
        return None
    try:
        found = Plan.load(path)
    except PlanError as error:
        say(f"ACE: the plan kept from an earlier run cannot be used and is made again ({error})")
        return None
    os.utime(path)  # used now: the others are forgotten first
    return found


def _forget_old(newest: Path) -> None:
    """The cache keeps the plans of so many models; those that were not used for longest go."""
    plans = sorted(newest.parent.glob("*.safetensors"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in plans[MOST_KEPT:]:
        old.unlink(missing_ok=True)
        Path(f"{old}.lock").unlink(missing_ok=True)
