"""The texts of a plan, and what the default's thresholds would realise on the others."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from . import show

if TYPE_CHECKING:
    from rich.table import Table

    from ..plan import Curve, Plan

BUDGETS = (0.3, 0.5)


def texts_json(plan: Plan) -> list[dict[str, Any]]:
    from ..plan import labels

    shown = labels(plan.workloads)
    dates = {c.workload.sha256: c.date for c in plan.curves}
    return [
        {
            **{"workload": shown[w.sha256], "sha256": w.sha256, "tokens": w.tokens},
            **{"date": dates.get(w.sha256, "unknown"), "default": w.sha256 == plan.default_workload},
            "carried": [
                _carried(plan, c) for c in plan.curves if c.workload == w and plan.default_workload != w.sha256
            ],
        }
        for w in plan.workloads
    ]


def _carried(plan: Plan, curve: Curve) -> dict[str, Any]:
    """What the default text's τ for some budgets realises on this one, by the unskipped model's curves."""
    own = plan.curve(curve.settings, plan.default_workload or "")
    budgets = [b for b in BUDGETS if own is not None and b <= own.limit]
    realised = {f"{b:g}": curve.ratio(own.threshold(b)) for b in budgets if own is not None}
    return {"policy": curve.settings["policy"], "settings": curve.settings, "realised": realised}


def texts_table(texts: list[dict[str, Any]]) -> Table:
    rows = []
    for t in texts:
        name, carried = f"{t['workload']}{' (default)' * t['default']}", filter(itemgetter("realised"), t["carried"])
        rows.append([name, t["sha256"][:12], f"{t['tokens']:,}", t["date"], "; ".join(map(_said, carried)) or "–"])
    columns = ["text", "sha256", "tokens", "mapped", "with the default's thresholds, dense"]
    return show.table("workloads", columns, rows)


def _said(carried: dict[str, Any]) -> str:
    return f"{carried['policy']} " + ", ".join(f"{float(b):.0%} → {r:.1%}" for b, r in carried["realised"].items())
