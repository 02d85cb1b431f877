"""Several writers of one plan: each puts its own into the file as it is now, not as it was when its work began."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..files import expand, locked, replace_here, unwritable
from .record import Plan, equal


def update(path: str | Path, base: Plan, plan: Plan) -> Plan:
    """Put everything that `plan` has and `base` had not into the file as it is now; return what the file then holds.

    `base` is the plan as it was read from the file. Of an entry that both sides changed, this one's stays.
    """
    path = expand(path)
    real = Path(os.path.realpath(path))
    try:
        with locked(real.parent):
            now = Plan.load(real) if real.exists() else base
            if now.fingerprint.difference(base.fingerprint) or not now.fingerprint.same_routers(base.fingerprint):
                raise PlanError(
                    f"{path} is of another model now: it was replaced while this work ran. Nothing was changed there; run the "
                    "command again with a plan of its own."
                )
            merged = plan if equal(now, base) else _merge(now, base, plan)
            replace_here(real, merged.to_bytes())
    except OSError as error:
        raise unwritable(path, error, "The plan") from error
    return merged


def _merge(now: Plan, base: Plan, plan: Plan) -> Plan:
    """Put what changed from `base` to `plan` into `now`."""
    rest = [f.name for f in fields(Plan) if f.name not in ("fingerprint", "thresholds", "curves", "recommendation")]
    changes = {name: _join(*(getattr(one, name) for one in (now, base, plan))) for name in rest}
    merged = replace(now, **changes)
    for curve in plan.curves:
        if not any(equal(curve, other) for other in base.curves):
            merged = merged.with_curve(curve)
    if not equal(plan.recommendation, base.recommendation):
        merged = replace(merged, recommendation=plan.recommendation)  # one choice: not the keys of two
    merged = merged.with_thresholds([t for t in plan.thresholds if t not in base.thresholds])
    return replace(merged, default_workload=changes["default_workload"] or merged.default_workload)


def _join(now: Any, base: Any, new: Any) -> Any:
    """Put what changed from `base` to `new` into `now`: dictionaries key by key, sequences item by item."""
    if isinstance(new, Mapping) and isinstance(now, Mapping) and isinstance(base, Mapping):
        both = {key: _join(now[key], base.get(key), value) for key, value in new.items() if key in now}
        return {**now, **both, **{key: value for key, value in new.items() if key not in now and key not in base}}
    if isinstance(new, Sequence) and not isinstance(new, str) and isinstance(now, Sequence):
        items = [*now, *(item for item in new if item not in (base or ()) and item not in now)]
        return tuple(items) if isinstance(new, tuple) else items
    return now if equal(new, base) else new
