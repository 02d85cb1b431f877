"""Several writers of one plan: each puts what it found into the file as it is now, not as it was when the work began."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..files import expand, locked, replace_here, unwritable
from .record import Plan, equal


def update(path: str | Path, had: Plan, made: Plan) -> Plan:
    """What the file holds after everything that `made` has and `had` had not was put into it.

    `had` is the plan as it was read from the file. Entries that both sides have are the newer ones.
    """
    path = expand(path)
    real = Path(os.path.realpath(path))
    try:
        with locked(real.parent):
            now = Plan.load(real) if real.exists() else had
            if now.fingerprint.difference(had.fingerprint) or not now.fingerprint.same_routers(had.fingerprint):
                raise PlanError(
                    f"{path} is of another model now: it was replaced while this work ran. Nothing was changed there; run the "
                    "command again with a plan of its own."
                )
            merged = made if equal(now, had) else _merged(now, had, made)
            replace_here(real, merged.to_bytes())
    except OSError as error:
        raise unwritable(path, error, "The plan") from error
    return merged


def _merged(now: Plan, had: Plan, made: Plan) -> Plan:
    rest = [f.name for f in fields(Plan) if f.name not in ("fingerprint", "thresholds", "curves", "recommendation")]
    changes = {name: _joined(*(getattr(plan, name) for plan in (now, had, made))) for name in rest}
    merged = replace(now, **changes)
    for curve in made.curves:
        if not any(equal(curve, other) for other in had.curves):
            merged = merged.with_curve(curve)
    if not equal(made.recommendation, had.recommendation):
        merged = replace(merged, recommendation=made.recommendation)  # one choice: not the keys of two
    merged = merged.with_thresholds([t for t in made.thresholds if t not in had.thresholds])
    return replace(merged, default_workload=changes["default_workload"] or merged.default_workload)


def _joined(now: Any, had: Any, made: Any) -> Any:
    """`now` with what changed from `had` to `made`; dictionaries key by key, sequences item by item."""
    if isinstance(made, Mapping) and isinstance(now, Mapping) and isinstance(had, Mapping):
        both = {key: _joined(now[key], had.get(key), value) for key, value in made.items() if key in now}
        return {**now, **both, **{key: value for key, value in made.items() if key not in now and key not in had}}
    if isinstance(made, Sequence) and not isinstance(made, str) and isinstance(now, Sequence):
        items = [*now, *(item for item in made if item not in (had or ()) and item not in now)]
        return tuple(items) if isinstance(made, tuple) else items
    return now if equal(made, had) else made
