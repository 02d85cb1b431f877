"""Measured results in a terminal: comparisons, thresholds, perplexity, tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .show import table
from .terminal import say

OFF = 0.005  # a realised ratio this far from the budget is marked


def print_compare(console: Console, results: dict[str, Any], rival: str | None = None) -> None:
    """One table for each gain: methods down, budgets across, the best of a column in bold."""
    from ..lab.compare.verdict import against

    for gain in results["grid"]["gains"]:
        console.print(_compare_table(results, gain))
    if any(abs(c["realised"] - c["budget"]) > OFF for c in results["cells"]):
        say("* realised more than half a point off the budget: the results file has the ratio", console)
    if rival is not None:
        console.print(_rival_table(against(results, rival), rival))


def _compare_table(results: dict[str, Any], gain: str) -> Table:
    """KL and perplexity of each method, first the nearest to the unskipped model at the budget next to 50 % that it has."""
    from ..lab.compare.verdict import kl_of

    cells = {(c["method"], c["budget"]): c for c in results["cells"] if c["gain"] == gain}
    kls = {key: kl_of(cell) for key, cell in cells.items()}
    budgets, dense = results["grid"]["budgets"], results["dense"]["perplexity"]
    usable = [(budget, kl) for (method, budget), kl in kls.items() if method not in results["references"]]
    best = {b: min((kl for budget, kl in usable if budget == b), default=0.0) for b in budgets}
    title = f"KL to the unskipped model, perplexity ({dense:.2f} unskipped); gain {gain}"
    made = table(title, ["method", *(f"{100 * b:.3g}%" for b in budgets)], [])
    places = sorted(budgets, key=lambda b: abs(b - 0.5))
    order = {m: next((kls[m, b] for b in places if (m, b) in kls), math.inf) for m in results["grid"]["methods"]}
    for method in sorted(order, key=lambda m: order[m]):
        row = [_compare_cell(cells.get((method, b)), kls.get((method, b)) == best[b]) for b in budgets]
        if any(row):
            made.add_row(escape(method), *row)
    return made


def _compare_cell(cell: dict[str, Any] | None, best: bool) -> str:
    if cell is None:
        return ""
    kl = f"{cell['kl']['value']:.4f} " if "kl" in cell else ""
    text = f"{kl}{cell['perplexity']:.2f}{'*' if abs(cell['realised'] - cell['budget']) > OFF else ''}"
    return f"[bold]{text}[/]" if best else text


def _rival_table(rows: Sequence[dict[str, Any]], rival: str) -> Table:
    lines = [
        [r["method"], r["gain"], f"{100 * r['budget']:.3g}%", _change(r.get("kl")), _change(r), f"{r['p']:.3f}"]
        for r in rows
    ]
    columns = ["method", "gain", "budget", "KL (95 % interval)", "perplexity (95 % interval)", "p"]
    return table(f"change of KL and perplexity against {rival}", columns, lines)


def _change(found: dict[str, Any] | None) -> str:
    """A relative change with its interval, where there are windows enough for one."""
    if found is None:
        return "–"
    bounds = "" if found["low"] is None else f" ({found['low']:+.2%} … {found['high']:+.2%})"
    return f"{found['value']:+.2%}{bounds}"


def print_thresholds(console: Console, results: dict[str, Any]) -> None:
    budgets = results["budgets"]
    columns = [f"{b:.0%}" for b in budgets]
    own = {(r["workload"], r["budget"]): r for r in results["workloads"]}
    names = list(dict.fromkeys(r["workload"] for r in results["workloads"]))
    rows = [[Path(n).stem, *(f"{own[n, b]['threshold']:.6f}" if (n, b) in own else "" for b in budgets)] for n in names]
    console.print(table("threshold by workload", ["workload", *columns], rows))
    carried = {(r["from"], r["to"], r["budget"]): r["realised"] for r in results["transfers"]}
    pairs = list(dict.fromkeys((a, b) for a, b, _ in carried))
    rows = [
        [
            f"{Path(a).stem} → {Path(b).stem}",
            *(f"{carried[a, b, x]:.2%}" if (a, b, x) in carried else "" for x in budgets),
        ]
        for a, b in pairs
    ]
    console.print(table("realised when carried to another workload", ["from → to", *columns], rows))
    rows = [[r["way"], str(r["passes"]), f"{r['seconds']:.1f}", f"{100 * r['worst']:.2f}"] for r in results["cost"]]
    console.print(table("cost of mapping all budgets", ["way", "passes", "seconds", "worst miss, points"], rows))


def correlation_table(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    kinds = {"pearson": "pearson", "spearman": "spearman", "expert_pearson": "by expert", "expert_spearman": "spearman"}
    rows = [
        [key, name, *(f"{values[kind]:.2f}" for kind in kinds)]
        for key, layer in found.items()
        for name, values in layer.items()
    ]
    return table("tables against the norm of expert outputs", ["layer", "table", *kinds.values()], rows)


def print_perplexity(console: Console, results: dict[str, Any], protocol: str, window: int) -> None:
    from ..scoring.statistics import Interval

    bounds = Interval(results["perplexity"], *results["interval"])
    say(
        f"perplexity {results['perplexity']:.4f} ({bounds}); protocol {protocol}, "
        f"{results['windows']} windows of {window:,} tokens, {results['targets']:,} counted",
        console,
    )
    if results["ace"] is not None:
        say(f"requested {results['setup']['skip']:.1%}, realised {results['ace']['realised']:.2%}", console)


def tasks_table(results: dict[str, Any]) -> Table:
    """Scores of each task and budget with their intervals, and the change against the unskipped model."""
    rows = []
    for c in results["cells"]:
        against = ""
        if c["change"] is not None:
            change, low, high = (100 * c["change"][name] for name in ("value", "low", "high"))
            against = f"{change:+.2f} points ({low:+.1f} … {high:+.1f})"
        value = f"{100 * c['value']:.2f} % ({' – '.join(f'{100 * bound:.1f}' for bound in c['interval'])})"
        rows.append([c["task"], c["metric"], f"{c['skip']:.0%}", f"{c['realised']:.2%}", value, against])
    columns = ["task", "metric", "budget", "realised", "score", "against unskipped"]
    return table(f"tasks: {results['settings']}", columns, rows)
