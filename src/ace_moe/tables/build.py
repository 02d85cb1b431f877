"""Checkpoint → plan: the fingerprint of a model, the tables a policy reads, and the plan of a model that was given none."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..checkpoint import MoEModel
from ..checkpoint.model import check_sizes
from ..errors import OptionError, OutputError, PlanError, StructureError
from ..files import cache_folder
from ..plan import Plan, missing_table, update
from ..policies import Policy
from . import TABLES, tables_of

MOST_KEPT = 64  # plans of models that were given none; each has under a few MiB
logger = logging.getLogger("vllm.ace_moe")  # what happens in an engine's worker is seen in its log


def build_plan(
    model: str | Path | PreTrainedModel | MoEModel, tables: Iterable[str] = (), *, device: str | None = None
) -> Plan:
    """Make a plan that knows its model, with the named tables or none; `undefined` says why the model lacks one.

    Without tables, only router rows and a few rows of some experts are read. Tables are computed layer by layer, on `device`,
    else where the weights are.
    """
    names = list(tables)
    if unknown := [name for name in names if name not in TABLES]:
        raise OptionError(f"There is no table {unknown[0]!r}. From weights alone come: {', '.join(TABLES)}.")
    moe = MoEModel.open(model)
    fingerprint = moe.fingerprint()
    check_sizes(fingerprint)
    computed, undefined = _computed(moe, names, device)
    return Plan(computed, fingerprint, moe.name, undefined)


def add_tables(
    plan: Plan,
    wanted: Iterable[str],
    model: str | Path | PreTrainedModel | MoEModel,
    *,
    device: str | None = None,
) -> Plan:
    """Add those of the wanted tables that come from weights alone and that the plan does not have."""
    names = [name for name in plan.lacks(wanted) if name in TABLES]
    if not names:
        return plan
    moe = MoEModel.open(model)
    plan.check_model(moe.fingerprint())
    computed, undefined = _computed(moe, names, device)
    if undefined:
        raise StructureError(f"{' '.join(dict.fromkeys(undefined.values()))} Policy 'share' needs no table.")
    return plan.with_tables(computed)


def check_tables(plan: Plan, policy: Policy, calibrations: Container[str] = ()) -> None:
    """Refuse a policy whose tables are undefined for the plan's model, or made by a calibration that was not run.

    `calibrations`: tables that the caller is about to calibrate.
    """
    for name in plan.lacks(policy.tables):
        if name in plan.undefined:
            raise PlanError(
                f"Policy {policy.key!r} needs the table {name}, which this model does not have: {plan.undefined[name]} "
                "Policy 'share' needs no table."
            )
        if name not in TABLES and name not in calibrations:
            raise PlanError(missing_table(policy.key, name))


def _computed(
    moe: MoEModel, names: list[str], device: str | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Compute the tables of every layer, and say why a name has none; what one layer lacks is not a table of the model."""
    computed: dict[str, dict[str, Tensor]] = {site.key: {} for site in moe.sites}
    undefined: dict[str, str] = {}
    if not names:
        return computed, undefined
    with progress.task("layers", len(moe.sites)) as task:
        for site in moe.sites:
            try:
                layer = moe.layer(site)
                computed[site.key], missing = tables_of(layer if device is None else layer.to(device), names)
            except StructureError as error:  # the layout of its experts is unknown
                missing = dict.fromkeys(names, str(error))
            undefined = missing | undefined
            task.advance()
    return {key: {n: t for n, t in layer.items() if n not in undefined} for key, layer in computed.items()}, undefined


# ---- a plan when none is given ------------------------------------------------------------------------------------------


def automatic_plan_path(model: str | Path) -> tuple[Path, MoEModel]:
    """Say where the plan of a model that is given none is kept; also that model, opened."""
    moe = MoEModel.open(model)
    return cache_folder() / f"{moe.name}-{moe.content()[:16]}.safetensors", moe


def automatic_plan(model: str | Path, tables: Iterable[str] = (), say: Callable[[str], None] = logger.warning) -> Plan:
    """Take the model's plan from the cache, or make and keep one, with at least the named tables.

    One process makes it, the others wait.
    """
    from filelock import FileLock

    path, moe = automatic_plan_path(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            kept = _kept(path, say)
            plan = build_plan(moe) if kept is None else kept
            if lacking := plan.lacks(tables):
                say(
                    f"ACE: computing the tables {', '.join(lacking)} of {moe.name} ({len(moe.sites)} layers) into {path}."
                )
                plan = add_tables(plan, lacking, moe)
            if kept is None:
                say(f"ACE: no plan was given; keeping one of {moe.name} at {path}.")
                plan.save(path)
                _forget_old(path.parent)
            elif plan is not kept:
                plan = update(path, kept, plan)
            return plan
    except OSError as error:
        raise OutputError(
            f"A plan could not be kept in {path.parent} ({error.strerror or error}). Make one with `ace plan {model} -o "
            "plan.safetensors` and name it with --plan, or set ACE_CACHE to a folder that can be written."
        ) from error


def _kept(path: Path, say: Callable[[str], None]) -> Plan | None:
    """Load the plan that is kept there; None if there is none, or none that can be read any more."""
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except PlanError as error:
        say(f"ACE: the plan kept from an earlier run cannot be used and is made again ({error})")
        return None
    say(f"ACE: no plan was given; using the one made earlier at {path}.")
    os.utime(path)  # used now: the others are forgotten first
    return plan


def _forget_old(folder: Path) -> None:
    """Delete the plans that were not used for longest, past as many as the cache keeps."""
    plans = sorted(folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in plans[MOST_KEPT:]:
        old.unlink(missing_ok=True)
        Path(f"{old}.lock").unlink(missing_ok=True)
