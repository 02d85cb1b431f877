"""How results look in a terminal: tables for people, plain dictionaries for --json."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import OutputError
from ..files import expand

if TYPE_CHECKING:
    from ..checkpoint import MoEModel
    from ..checkpoint.structure import Site
    from ..demo import Cell
    from ..plan import Plan, Threshold


T = TypeVar("T")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """The first columns are words, the others numbers."""
    made = Table(title=escape(title), title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def print_line(console: Console, line: str) -> None:
    """As it is: names of files may hold brackets, and a command to copy is not broken into lines."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def check_writable(path: Path) -> None:
    """Fail before the long work starts."""
    from ..sharing.kept import check_own

    path = expand(path)
    check_own(path)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"There is no folder {folder} to write {path.name} into. Create it, or choose another place.")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(
            f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no permission'}. Choose another place."
        )


def check_folder(path: Path) -> None:
    """A folder that is there, or can be made."""
    path = expand(path)
    existing = next((p for p in (path, *path.resolve().parents) if p.exists()), path)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OutputError(
            f"{path} cannot be written: {f'no permission in {existing}' if existing.is_dir() else f'{existing} is a file'}. "
            "Choose another folder with -o."
        )
    if (path / "config.json").exists():
        raise OutputError(f"{path} is a checkpoint, which must stay as it is. Choose another folder with -o.")


def plan_table(plan: Plan) -> Table:
    rows = []
    for key, layer in plan.tables.items():
        experts = plan.fingerprint.structure[key]["experts"]
        spread = [f"{t.min():.2f} – {t.max():.2f}" for t in layer.values()]
        rows.append([key, str(experts), *spread])
    names = list(next(iter(plan.tables.values()), {}))
    return table(f"tables of {plan.model} (layer mean 1)", ["layer", "experts", *names], rows)


def entries_table(entries: Sequence[Threshold]) -> Table:
    """Budgets with what they realise and what they do to predictions."""
    rows = [
        [
            f"{t.budget:.1%}",
            f"{t.threshold:.6f}",
            f"{t.realised:.2%}",
            str(t.passes) if t.corrected else "–",
            *_distance(t),
        ]
        for t in entries
    ]
    columns = ["budget", "threshold", "realised", "correction passes", "KL", "same top token", "acceptance"]
    return table("thresholds", columns, rows)


def _distance(entry: Threshold) -> list[str]:
    """KL with its interval where there are windows enough, agreement, acceptance."""
    found = entry.fidelity
    if found is None:
        return ["–"] * 3
    kl = found["kl"]
    bounds = "" if kl["low"] is None else f" ({kl['low']:.4f} – {kl['high']:.4f})"
    return [f"{kl['value']:.4f}{bounds}", f"{found['agreement']['value']:.1%}", f"{found['acceptance']['value']:.1%}"]


def entry_json(entry: Threshold) -> dict[str, Any]:
    names = ("budget", "threshold", "realised", "passes", "corrected", "fidelity")
    return {name: getattr(entry, name) for name in names} | {"workload": entry.workload.name}


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
        "fingerprint": plan.fingerprint.to_json(),
        "undefined": plan.undefined,
        "tables": {k: {n: t.tolist() for n, t in layer.items()} for k, layer in plan.tables.items()},
        "guarded": plan.guarded,
        "thresholds": [asdict(t) for t in plan.thresholds],
        "recommendation": plan.recommendation,
        "made": list(plan.made),
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
            f"{t.policy}{''.join(f' {v}' for v in t.params.values())}{f' {t.factor}' if t.factor else ''}",
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
    from ..checkpoint.model import how_it_runs, outliers
    from ..integrations.transformers import on_gpu

    return {
        "architecture": moe.architecture,
        "layers": moe.structure(),
        "norms": {s.key: s.norm_path for s in moe.sites},
        "routers": {s.key: s.router_path for s in moe.sites},
        "dispatch": {s.key: on_gpu(s.experts) for s in moe.sites},
        "formats": moe.formats(),
        "runs": how_it_runs(moe),
        "outliers": outliers(moe.fingerprint()),
        "not_covered": moe.not_covered,
    }


def folded(facts: Mapping[str, T]) -> list[tuple[T, list[str]]]:
    """Layers that are alike, together: each fact with the layers that have it, in their order."""
    return [(fact, [key for key, own in facts.items() if own == fact]) for fact in dict.fromkeys(facts.values())]


def said(keys: Sequence[str]) -> str:
    """ "0–2, 5, 7": layers with runs of numbers in short."""
    runs: list[list[str]] = []
    for key in keys:
        follows = bool(runs) and key.isdigit() and runs[-1][-1].isdigit() and int(key) == int(runs[-1][-1]) + 1
        runs[-1].append(key) if follows else runs.append([key])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _print_folded(console: Console, what: str, facts: Mapping[str, str]) -> None:
    for fact, keys in folded(facts):
        print_line(console, f"{what}: {fact} ({'all layers' if len(keys) == len(facts) else said(keys)})")


def _parts(site: Site) -> str:
    """The classes of a layer's experts, norm and router."""
    norm = type(site.norm).__name__ if site.norm is not None else "no norm"
    router = type(site.router).__name__ if site.router is not None else "no router found"
    return f"{type(site.experts).__name__}, {norm}, {router} with the {site.router_input} input"


def report_table(report: Mapping[str, Any]) -> Table:
    """What was skipped, layer by layer."""
    rows = [
        [key, *(f"{phases[p]['realised']:.1%}" if p in phases else "–" for p in ("prefill", "decode"))]
        for key, phases in {"all": report, **report["layers"]}.items()
    ]
    return table("slots not run", ["layer", "prefill", "decode"], rows)


def print_model(console: Console, moe: MoEModel) -> None:
    from ..checkpoint.model import how_it_runs, outliers
    from ..integrations.transformers import on_gpu

    names = ("experts", "top_k", "hidden", "intermediate")
    sizes = {key: tuple(str(facts[name]) for name in names) for key, facts in moe.structure().items()}
    rows = [[said(keys), *numbers] for numbers, keys in folded(sizes)]
    title = f"{len(moe)} MoE layers of {moe.name} ({moe.architecture})"
    console.print(table(title, ["layers", "experts", "top k", "d", "m"], rows))
    _print_folded(console, "built of", {site.key: _parts(site) for site in moe.sites})
    _print_folded(console, "on a GPU", {site.key: on_gpu(site.experts) for site in moe.sites})
    _print_folded(console, "stored as", {key: ", ".join(found) for key, found in moe.formats().items()})
    print_line(console, f"runs: {how_it_runs(moe)}")
    for key, size in outliers(moe.fingerprint()).items():
        print_line(
            console, f"layer {key}: experts of rms {size:.3g} are no weights; a factor of their format is missing"
        )
    for path in moe.not_covered:
        print_line(console, f"not covered: {path} (a text pass never reaches it)")


def print_pair(console: Console, pair: dict[str, Any]) -> None:
    rows = [
        [key, name, *(f"{100 * found[n]:.3g} %" for n in ("mean", "worst")), f"{found['order']:.4f}"]
        for key, layer in pair["layers"].items()
        for name, found in layer.items()
    ]
    columns = ["layer", "table", "mean change", "largest change", "rank correlation"]
    console.print(table(f"tables of {pair['model']} against those of {pair['other']}", columns, rows))
    print_line(
        console, f"routers: {'the same, so one plan serves both' if pair['same_routers'] else pair['difference']}"
    )
    if pair["experts"]:
        print_line(console, pair["experts"])


# ---- comparisons --------------------------------------------------------------------------------------------------

OFF = 0.005  # a realised ratio this far from the budget is marked


def print_compare(console: Console, results: dict[str, Any], rival: str | None = None) -> None:
    """One table for each gain: methods down, budgets across, the best of a column in bold."""
    from ..evaluate.compare import against

    for gain in results["grid"]["gains"]:
        console.print(_compare_table(results, gain))
    if any(abs(c["realised"] - c["budget"]) > OFF for c in results["cells"]):
        print_line(console, "* realised more than half a point off the budget: the results file has the ratio")
    if rival is not None:
        console.print(_rival_table(against(results, rival), rival))


def _compare_table(results: dict[str, Any], gain: str) -> Table:
    """KL and perplexity of each method, the nearest to the unskipped model first."""
    from ..evaluate.compare import kl_of

    cells = {(c["method"], c["budget"]): c for c in results["cells"] if c["gain"] == gain}
    budgets, dense = results["grid"]["budgets"], results["dense"]["perplexity"]
    usable = [c for c in cells.values() if c["method"] not in results["references"]]
    best = {b: min((kl_of(c) for c in usable if c["budget"] == b), default=0.0) for b in budgets}
    title = f"KL to the unskipped model, perplexity ({dense:.2f} unskipped); gain {gain}"
    made = table(title, ["method", *(f"{100 * b:.3g}%" for b in budgets)], [])
    for method in sorted(results["grid"]["methods"], key=lambda m: _place(cells, m, budgets)):
        row = [_compare_cell(cells.get((method, b)), best[b]) for b in budgets]
        if any(row):
            made.add_row(escape(method), *row)
    return made


def _place(cells: dict[tuple[str, float], dict[str, Any]], method: str, budgets: Sequence[float]) -> float:
    """By the budget next to 50 % that the method has."""
    from ..evaluate.compare import kl_of

    has = [cells[method, b] for b in sorted(budgets, key=lambda b: abs(b - 0.5)) if (method, b) in cells]
    return kl_of(has[0]) if has else math.inf


def _compare_cell(cell: dict[str, Any] | None, best: float) -> str:
    from ..evaluate.compare import kl_of

    if cell is None:
        return ""
    kl = f"{cell['kl']['value']:.4f} " if "kl" in cell else ""
    text = f"{kl}{cell['perplexity']:.2f}{'*' if abs(cell['realised'] - cell['budget']) > OFF else ''}"
    return f"[bold]{text}[/]" if kl_of(cell) == best else text


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


def _stem(name: str) -> str:
    return Path(name).stem


def print_thresholds(console: Console, results: dict[str, Any]) -> None:
    budgets = results["budgets"]
    columns = [f"{b:.0%}" for b in budgets]
    own = {(r["workload"], r["budget"]): r for r in results["workloads"]}
    names = list(dict.fromkeys(r["workload"] for r in results["workloads"]))
    rows = [[_stem(n), *(f"{own[n, b]['threshold']:.6f}" if (n, b) in own else "" for b in budgets)] for n in names]
    console.print(table("threshold by workload", ["workload", *columns], rows))
    carried = {(r["from"], r["to"], r["budget"]): r["realised"] for r in results["transfers"]}
    pairs = list(dict.fromkeys((a, b) for a, b, _ in carried))
    rows = [
        [f"{_stem(a)} → {_stem(b)}", *(f"{carried[a, b, x]:.2%}" if (a, b, x) in carried else "" for x in budgets)]
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
    from ..statistics import Interval, said

    bounds = said(Interval(results["perplexity"], *results["interval"]))
    print_line(
        console,
        f"perplexity {results['perplexity']:.4f} ({bounds}); protocol {protocol}, "
        f"{results['windows']} windows of {window:,} tokens, {results['targets']:,} counted",
    )
    if results["ace"] is not None:
        print_line(console, f"requested {results['setup']['skip']:.1%}, realised {results['ace']['realised']:.2%}")


def _points(value: float, digits: int = 1) -> str:
    return f"{100 * value:+.{digits}f}"


def tasks_table(results: dict[str, Any]) -> Table:
    rows = []
    for c in results["cells"]:
        change = c["change"]
        against = (
            f"{_points(change['value'], 2)} points ({_points(change['low'])} … {_points(change['high'])})"
            if change
            else ""
        )
        value = f"{100 * c['value']:.2f} % ({' – '.join(f'{100 * bound:.1f}' for bound in c['interval'])})"
        rows.append([c["task"], c["metric"], f"{c['skip']:.0%}", f"{c['realised']:.2%}", value, against])
    columns = ["task", "metric", "budget", "realised", "score", "against unskipped"]
    return table(f"tasks: {results['settings']}", columns, rows)
