"""docs/results.md from the stored results, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study_claims import claims, met, paired

from ace_moe.evaluate.compare import cell_at
from ace_moe.evaluate.store import read_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "results.md"
MODELS = {
    "lab": "lab-moe: 86 M parameters, 8 layers, 64 experts, top-8, trained from scratch on 121 M tokens of mixed text",
    "demo": "demo-moe: 7.6 M parameters, 6 layers, 32 experts, top-8, the model that ships with the package",
}
GAINS = {"kept": "the paper's", "power": "the default here", "none": "gates as they are"}
Results = dict[str, Any]

HEAD = """# Results

Every method on two small models, measured with the commands given at each section and written by
`python benchmarks/study.py --write` from `benchmarks/results/*.json`. Nothing on this page is typed by hand.

Both models have the Qwen3-MoE architecture and were trained from scratch; they are far smaller than what people serve, and
lab-moe is not part of the package. The order of methods can differ on your model: `ace compare` makes these tables for it.

How to read a cell: perplexity, and in brackets the 95 % interval of its change against the unskipped model in per cent. The
interval is paired (same windows) and bootstrapped over windows. `*`: the realised ratio is more than half a point off the
budget. `–`: the method cannot meet that budget. Skipped slots are not computed in any of these runs.
"""


def page(folder: Path) -> str:
    parts = [HEAD]
    for name, title in MODELS.items():
        found = {kind: _stored(folder, kind, name) for kind in ("compare", "findings", "thresholds")}
        if found["compare"] or found["findings"]:
            parts += model_part(title, found) + tasks(folder / f"tasks_{name}.json")
    return "\n".join(parts)


def _stored(folder: Path, kind: str, name: str) -> Results | None:
    paths = {
        "compare": ("compare", f"compare_{name}.json"),
        "findings": ("compare", f"compare_{name}_findings.json"),
        "thresholds": ("study thresholds", f"thresholds_{name}.json"),
    }
    stored_kind, file = paths[kind]
    return read_json(folder / file, stored_kind) if (folder / file).exists() else None


def model_part(title: str, found: dict[str, Results | None]) -> list[str]:
    main, findings, thresholds = found["compare"] or found["findings"], found["findings"], found["thresholds"]
    assert main is not None
    parts = [
        f"## {title}\n",
        setting(main),
        "### What holds of the paper's claims\n",
        bullets(claims(main, thresholds)),
    ]
    for gain in (g for g in GAINS if g in main["grid"]["gains"]):
        parts += [f"### Perplexity with gain `{gain}` ({GAINS[gain]})\n", quality(main, gain)]
    parts += refusals(main) + ablations(main) + rivals(main) + oracle(main)
    if found["compare"] and findings:
        parts += uncorrected(findings)
    return parts + (stability(thresholds) if thresholds else [])


def setting(results: Results) -> str:
    text, used = results["workload"], results["environment"]
    where = used.get("card", used["device"].upper())
    few = (
        " So few windows carry little: an interval clear of 0 is a hint here, not a proof."
        if text["windows"] < 16
        else ""
    )
    corrected = "Budgets are corrected on the skipped model." if results["identity"]["correct"] else ""
    return (
        f"{text['windows']} windows of {text['window']:,} tokens of {text['name']}, {results['identity']['dtype']}, on "
        f"{where}; torch {used['torch']}, transformers {used['transformers']}. Unskipped perplexity "
        f"{results['dense']['perplexity']:.2f}. {corrected}{few}"
        "\n\n    " + "\n    ".join(results["command"].split(" && ")) + "\n"
    )


# ---- tables -------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"


def per_cent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def shown(cell: Results | None) -> str:
    if cell is None:
        return "–"
    mark = "" if met(cell) else "\\*"
    low, high = (100 * cell["change"][side] for side in ("low", "high"))
    return f"{cell['perplexity']:.2f}{mark} ({low:+.1f}…{high:+.1f})"


def row(results: Results, method: str, gain: str) -> list[str] | None:
    cells = [cell_at(results, method, gain, budget) for budget in results["grid"]["budgets"]]
    return [f"`{method}`", *map(shown, cells)] if any(cells) else None


def budgets_of(results: Results) -> list[str]:
    return [per_cent(b) for b in results["grid"]["budgets"]]


def quality(results: Results, gain: str) -> str:
    """Methods by their perplexity at 50 %, best first; the oracles, which save nothing, last."""

    def place(method: str) -> tuple[bool, float]:
        cell = cell_at(results, method, gain, 0.5)
        return method in results["references"], cell["perplexity"] if cell else float("inf")

    rows = [made for m in sorted(results["grid"]["methods"], key=place) if (made := row(results, m, gain))]
    return table(["method", *budgets_of(results)], rows)


def refusals(results: Results) -> list[str]:
    lines = []
    for method, refused in results["refused"].items():
        budgets = ", ".join(per_cent(b) for b in refused["budgets"])
        lines.append(f"`{method}` at {budgets}: {refused['reason']}")
    return ["### Budgets that were refused\n", bullets(lines)] if lines else []


def ablations(results: Results) -> list[str]:
    parts = []
    groups = {
        "Components: one table, or both": ("gsp", "rcr", "ace"),
        "Fusion of the two views": ("ace:fusion=min", "ace:fusion=mean", "ace"),
    }
    for title, methods in groups.items():
        rows = [
            [m, gain, *made[1:]]
            for gain in results["grid"]["gains"]
            for m in methods
            if (made := row(results, m, gain))
            for m in [f"`{'ace (max)' if 'Fusion' in title and m == 'ace' else m}`"]
        ]
        parts += [f"### {title}\n", table(["method", "gain", *budgets_of(results)], rows)]
    return parts


def rivals(results: Results) -> list[str]:
    """Paired changes against the plain gate share, which needs no table."""
    chosen = ("ace", "gsp", "rcr", "top_p", "relative", "aimer", "naee", "modes", "reap", "alloc_t")
    rows = []
    for gain in results["grid"]["gains"]:
        for method in chosen:
            found = [paired(results, method, "share", gain, b) for b in results["grid"]["budgets"]]
            if any(found):
                rows.append([f"`{method}`", gain, *(_against(one) for one in found)])
    head = "Change of perplexity against `share` at the same gain and budget, in per cent, with its 95 % interval.\n"
    return ["### Against a plain gate share\n", head, table(["method", "gain", *budgets_of(results)], rows)]


def _against(change: Any) -> str:
    return "–" if change is None else f"{100 * change.value:+.1f} ({100 * change.low:+.1f}…{100 * change.high:+.1f})"


def oracle(results: Results) -> list[str]:
    names = list(next(iter(results["oracle"].values())))
    rows = [
        [key, *(f"{layer[n]['spearman']:.2f}" for n in names), *(f"{layer[n]['expert_spearman']:.2f}" for n in names)]
        for key, layer in results["oracle"].items()
    ]
    head = (
        "Rank correlation of each table with ‖f(x)‖, the norm of the expert output it stands for: over slots, and over experts "
        "with their mean norms.\n"
    )
    columns = ["layer", *(f"{n}, slots" for n in names), *(f"{n}, experts" for n in names)]
    return ["### What the tables know\n", head, table(columns, rows)]


def uncorrected(results: Results) -> list[str]:
    rows = []
    for budget in results["grid"]["budgets"]:
        cells = [c for c in results["cells"] if c["budget"] == budget and c["method"] not in results["references"]]
        missed = [c["realised"] - budget for c in cells]
        rows.append([per_cent(budget), *(f"{100 * f(missed):+.2f}" for f in (min, max)), str(len(cells))])
    head = (
        "Realised ratio minus budget, in points, when thresholds come from one quantile pass of the unskipped model and are used "
        "as they are (the paper's protocol). A skipped model sees other hidden states, so ratios drift; correction removes it.\n"
    )
    return ["### Without correction\n", head, table(["budget", "lowest", "highest", "cells"], rows)]


def tasks(path: Path) -> list[str]:
    """Both harnesses; at threshold 0 every answer must be the one of the harness's own model."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for r in stored["rows"]:
        same = "yes" if r["same_to_the_last_digit"] else "NO"
        change = "{:+.1f} ({:+.1f}…{:+.1f})".format(*(100 * x for x in r["change"]))
        scores = [f"{100 * r[key]:.1f}" for key in ("stock", "at_0", "at_50")]
        rows.append([f"{r['harness']} {r['version']}", r["task"], str(r["questions"]), *scores[:2], same, scores[2],
                     per_cent(r["realised"], 1), change])  # fmt: skip
    head = (
        "Accuracy in per cent through both harnesses: their own model, ours at threshold 0, ours at a budget of 50 % (`ace`, "
        "gain `power`, threshold from another text), and the paired change with its interval. A model of this size is near "
        "chance on these tasks, and EvalScope asks it for letters and words that it was never taught to give.\n"
    )
    columns = [
        "harness",
        "task",
        "questions",
        "stock",
        "threshold 0",
        "same answers",
        "50 %",
        "realised",
        "change, points",
    ]
    return ["### Tasks\n", head, f"    {stored['command']}\n", table(columns, rows)]


# ---- thresholds ---------------------------------------------------------------------------------------------------


def stability(results: Results) -> list[str]:
    budgets = results["budgets"]
    own = {(r["workload"], r["budget"]): r["threshold"] for r in results["workloads"]}
    names = list(dict.fromkeys(name for name, _ in own))
    carried = {(r["from"], r["to"], r["budget"]): r["realised"] for r in results["transfers"]}
    columns = [per_cent(b) for b in budgets]
    first = [[name, *(f"{own[name, b]:.4f}" for b in budgets)] for name in names]
    second = [
        [f"{a} → {b}", *(f"{100 * carried[a, b, x]:.1f}" for x in budgets)] for a in names for b in names if a != b
    ]
    third = [[r["way"], str(r["passes"]), f"{r['seconds']:.1f}", f"{100 * r['worst']:.2f}"] for r in results["cost"]]
    policy = results["identity"]["policy"]
    return [
        "### Thresholds of four workloads\n",
        f"`{policy['policy']}`, gain `{policy['gain']}`, {results['workloads'][0]['tokens']:,} tokens of each text.\n",
        table(["workload", *columns], first),
        "Ratio realised, in per cent, when a threshold is carried to another workload:\n",
        table(["from → to", *columns], second),
        f"Cost of mapping all {len(budgets)} budgets on the first workload. The frontier walk is MoDES' search with one kind of "
        "token: up its grid of 100 thresholds, a pass at each. Seconds are wall time; CPU runs shared their machine, so count "
        "passes.\n",
        table(["way", "passes", "seconds", "worst miss, points"], third),
    ]
