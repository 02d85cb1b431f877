"""How results look in a terminal: tables for people, plain dictionaries for --json."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import PlanError, expand

if TYPE_CHECKING:
    from .budget import Fit
    from .checkpoint import MoEModel
    from .demo import Cell
    from .plan import Plan


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(title=escape(title), title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def print_line(console: Console, line: str) -> None:
    """As it is: names of files may hold brackets, and a command to copy is not broken into lines."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Fail before the long work starts."""
    path = expand(path)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise PlanError(f"There is no folder {folder} to write {path.name} into. Create it, or choose another place.")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise PlanError(
            f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no permission'}. Choose another place."
        )


def check_folder(path: Path) -> None:
    """A folder that is there, or can be made."""
    path = expand(path)
    existing = next((p for p in (path, *path.resolve().parents) if p.exists()), path)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PlanError(
            f"{path} cannot be written: {f'no permission in {existing}' if existing.is_dir() else f'{existing} is a file'}. "
            "Choose another folder with -o."
        )


def plan_table(plan: Plan) -> Table:
    rows = []
    for key, layer in plan.tables.items():
        experts = plan.fingerprint["structure"][key]["experts"]
        spread = [f"{t.min():.2f} – {t.max():.2f}" for t in layer.values()]
        rows.append([key, str(experts), *spread])
    names = list(next(iter(plan.tables.values()), {}))
    return table(f"tables of {plan.model} (layer mean 1)", ["layer", "experts", *names], rows)


def fits_table(fits: Sequence[Fit]) -> Table:
    rows = [
        [f"{f.budget:.1%}", f"{f.threshold:.6f}", f"{f.realised:.2%}", str(f.passes) if f.corrected else "–"]
        for f in fits
    ]
    return table("thresholds", ["budget", "threshold", "realised", "correction passes"], rows)


def demo_table(cells: Sequence[Cell]) -> Table:
    rows = [
        [
            "unskipped" if c.budget == 0 else c.rule,
            f"{c.budget:.0%}",
            f"{c.realised:.2%}",
            f"{c.threshold:.4f}",
            f"{c.perplexity:.2f}",
        ]
        for c in cells
    ]
    return table(
        "demo-moe on WikiText-2 (6 × 1,024 tokens)", ["rule", "budget", "realised", "threshold", "perplexity"], rows
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "undefined": plan.undefined,
        "tables": {k: {n: t.tolist() for n, t in layer.items()} for k, layer in plan.tables.items()},
        "thresholds": [asdict(t) for t in plan.thresholds],
    }


def print_plan(console: Console, plan: Plan) -> None:
    console.print(plan_table(plan))
    for name, reason in plan.undefined.items():
        print_line(console, f"no table {name}: {reason}")
    if not plan.thresholds:
        console.print("no thresholds yet: map them with `ace budget`")
        return
    rows = [
        [
            f"{t.policy}{''.join(f' {v}' for v in t.params.values())}",
            t.gain,
            str(t.min_active),
            f"{t.budget:.1%}",
            f"{t.threshold:.6f}",
            f"{t.realised:.2%}",
            t.workload.name,
        ]
        for t in plan.thresholds
    ]
    console.print(
        table("thresholds", ["policy", "gain", "min active", "budget", "threshold", "realised", "workload"], rows)
    )


def model_json(moe: MoEModel) -> dict[str, Any]:
    return {
        "architecture": moe.architecture,
        "layers": moe.structure(),
        "norms": {s.key: s.norm_path for s in moe.sites},
        "routers": {s.key: s.router_path for s in moe.sites},
        "not_covered": moe.not_covered,
    }


def print_model(console: Console, moe: MoEModel) -> None:
    rows = []
    for site, facts in zip(moe.sites, moe.structure().values(), strict=True):
        norm = type(site.norm).__name__ if site.norm is not None else "none"
        router = type(site.router).__name__ if site.router is not None else "not found"
        numbers = [str(facts[n]) for n in ("experts", "top_k", "hidden", "intermediate")]
        rows.append([site.key, *numbers, type(site.experts).__name__, norm, f"{router} ({site.router_input} input)"])
    columns = ["layer", "experts", "top k", "d", "m", "class", "norm", "router"]
    console.print(table(f"MoE layers of {moe.name} ({moe.architecture})", columns, rows))
    for path in moe.not_covered:
        print_line(console, f"not covered: {path} (a text pass never reaches it)")
