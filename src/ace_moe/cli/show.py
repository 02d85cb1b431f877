"""How results look in a terminal: tables for people, plain dictionaries for --json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .terminal import say

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


def plan_table(plan: Plan) -> Table:
    """Those that weigh experts, layers or slots; vectors, of which a budget may have two, say nothing here."""
    names, rows = [n for n in next(iter(plan.tables.values()), {}) if n not in plan.shapes], []
    for key, layer in plan.tables.items():
        experts = plan.fingerprint.structure[key]["experts"]
        spread = [f"{layer[n].min():.2f} – {layer[n].max():.2f}" for n in names]
        rows.append([key, str(experts), *spread])
    title = f"tables of {plan.model} (layer mean 1)" if names else f"layers of {plan.model}"
    return table(title, ["layer", "experts", *names], rows)


def entries_table(entries: Sequence[Threshold]) -> Table:
    """Budgets with what they realise and what they do to predictions."""
    rows = [[*_numbers(t), *_distance(t)] for t in entries]
    columns = ["budget", "threshold", "realised", "KL", "same\ntoken", "acceptance"]
    return table("thresholds", columns, rows)


def _numbers(entry: Threshold) -> list[str]:
    return [f"{entry.budget:.1%}", f"{entry.threshold:.6f}", f"{entry.realised:.2%}"]


def _distance(entry: Threshold) -> list[str]:
    """KL with its interval where there are windows enough, agreement, acceptance."""
    found = entry.fidelity
    if found is None:
        return ["–"] * 3
    kl = found["kl"]
    bounds = "" if kl["low"] is None else f" ({kl['low']:.4f}–{kl['high']:.4f})"
    return [f"{kl['value']:.4f}{bounds}", f"{found['agreement']['value']:.1%}", f"{found['acceptance']['value']:.1%}"]


def entry_json(entry: Threshold) -> dict[str, Any]:
    names = ("budget", "threshold", "realised", "passes", "corrected", "fidelity")
    return {name: getattr(entry, name) for name in names} | {"workload": entry.workload.name}


def demo_table(cells: Sequence[Cell]) -> Table:
    rows = []
    for c in cells:
        numbers = [f"{c.budget:.0%}", f"{c.realised:.2%}", f"{c.threshold:.4f}", f"{c.perplexity:.2f}"]
        rows.append([c.rule if c.budget else "unskipped", *numbers])
    columns = ["rule", "budget", "realised", "threshold", "perplexity"]
    return table("demo-moe on WikiText-2 (6 × 1,024 tokens)", columns, rows)


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
        say(f"no table {name}: {reason}", console)
    if not plan.thresholds:
        say("no thresholds yet: map them with `ace plan MODEL --plan PLAN --text FILE`", console)
        return
    rows = []
    for t in plan.thresholds:
        policy = f"{_method(t)}{f' {t.factor}' if t.factor else ''}"
        rows.append([policy, t.gain, str(t.min_active), *_numbers(t), t.workload.name])
    columns = ["policy", "gain", "min active", "budget", "threshold", "realised", "workload"]
    console.print(table("thresholds", columns, rows))


def _method(entry: Threshold) -> str:
    """As it is typed at --policy, defaults left out."""
    from ..plan import typed
    from ..policies import POLICIES

    usual = POLICIES[entry.policy]().params if entry.policy in POLICIES else {}
    return typed(entry.policy, {k: v for k, v in entry.params.items() if usual.get(k) != v})


def model_json(moe: MoEModel) -> dict[str, Any]:
    from ..checkpoint.model import how_it_runs, outliers
    from ..engines.transformers import on_gpu

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
        say(f"{what}: {fact} ({'all layers' if len(keys) == len(facts) else said(keys)})", console)


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
    from ..engines.transformers import on_gpu

    names = ("experts", "top_k", "hidden", "intermediate")
    sizes = {key: tuple(str(facts[name]) for name in names) for key, facts in moe.structure().items()}
    rows = [[said(keys), *numbers] for numbers, keys in folded(sizes)]
    title = f"{len(moe.sites)} MoE layers of {moe.name} ({moe.architecture})"
    console.print(table(title, ["layers", "experts", "top k", "d", "m"], rows))
    _print_folded(console, "built of", {site.key: _parts(site) for site in moe.sites})
    _print_folded(console, "on a GPU", {site.key: on_gpu(site.experts) for site in moe.sites})
    _print_folded(console, "stored as", {key: ", ".join(found) for key, found in moe.formats().items()})
    say(f"runs: {how_it_runs(moe)}", console)
    for key, size in outliers(moe.fingerprint()).items():
        wrong = f"experts of rms {size:.3g} are no weights; a factor of their format is missing"
        say(f"layer {key}: {wrong}", console)
    for path in moe.not_covered:
        say(f"not covered: {path} (a text pass never reaches it)", console)
