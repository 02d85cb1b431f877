"""Tables of docs/results.md from stored results of `ace compare` and `ace study thresholds` alone.

python benchmarks/study_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pages
from pages import DOCS, RESULTS, percent, written
from study_claims import Results, claims, in_per_cent, met, paired

from ace_moe.evaluate.compare import cell_at, kl_of
from ace_moe.evaluate.store import read_json

DOCUMENT = DOCS / "results.md"
MODELS = {
    "lab_moe": "lab-moe: Qwen3-MoE, 86 M parameters, 8 layers, 64 experts, top-8, normalised softmax gates",
    "lab_olmoe": "lab-olmoe: OLMoE, 12.8 M parameters, 64 experts, top-8, softmax gates that are not normalised, skewed routing",
    "lab_glm": "lab-glm: GLM-4-MoE, 11.7 M parameters, 64 experts, top-8, sigmoid router with bias, shared expert",
    "demo_moe": "demo-moe: Qwen3-MoE, 7.6 M parameters, 6 layers, 32 experts, top-8, the model that ships with the package",
}
GAINS = {"power": "the default here", "kept": "the paper's"}
RIVALS = (
    "fixed", "share:squared=true", "top_p", "top_p:squared=true", "ace", "gsp", "rcr", "aimer", "naee", "modes", "reap",
    "expert_sparsity:ace-paper", "sere:ace-paper", "xshare:ace-paper", "diep:ace-paper",
)  # fmt: skip
table = partial(pages.table, rule=" --- ")


def compared(folder: Path) -> dict[str, Results]:
    return {name: results for name in MODELS if (results := _stored(folder, "compare", name))}


def measured(folder: Path) -> str:
    found = compared(folder)
    parts = summary(found)
    for name, results in found.items():
        thresholds = _stored(folder, "thresholds", name)
        parts += model_part(MODELS[name], results, thresholds)
        parts += tasks(folder / "tasks_lab.json") if name == "lab_moe" else []
        parts += stability(thresholds) if thresholds else []
    return "\n".join(parts)


def _stored(folder: Path, kind: str, name: str) -> Results | None:
    path, kinds = folder / f"{kind}_{name}.json", {"compare": "compare", "thresholds": "study thresholds"}
    return read_json(path, kinds[kind]) if path.exists() else None


def summary(known: dict[str, Results]) -> list[str]:
    """KL at 50 % with the default gain, every method on every model, best first by the mean of ranks."""
    cells = {
        m: [cell_at(r, m, "power", 0.5) for r in known.values()]
        for r in known.values()
        for m in r["grid"]["methods"]
        if m not in r["references"]
    }
    order = sorted(cells, key=lambda m: sum(_rank(r, m) for r in known.values()))
    rows = [[f"`{m}`", *map(shown, cells[m])] for m in order if any(cells[m])]
    names = [MODELS[name].split(":")[0] for name in known]
    return ["## All models at 50 %, gain `power`\n", table(["method", *names], rows)] if known else []


def _rank(results: Results, method: str) -> int:
    mine = cell_at(results, method, "power", 0.5)
    kls = [kl_of(c) for c in results["cells"] if (c["gain"], c["budget"]) == ("power", 0.5)]
    return len(kls) if mine is None else sum(kl < kl_of(mine) for kl in kls)


def model_part(title: str, results: Results, thresholds: Results | None) -> list[str]:
    parts = [
        f"## {title}\n",
        setting(results),
        "### What holds of the paper's claims\n",
        bullets(claims(results, thresholds)),
    ]
    for gain in (g for g in GAINS if g in results["grid"]["gains"]):
        parts += [f"### KL with gain `{gain}` ({GAINS[gain]})\n", quality(results, gain)]
    return parts + refusals(results) + gains(results) + rivals(results) + oracle(results)


def setting(results: Results) -> str:
    text, used = results["workload"], results["environment"]
    where = used.get("card", used["device"].upper())
    few = (
        " So few windows carry little: an interval clear of 0 is a hint here, not a proof."
        if text["windows"] < 16
        else ""
    )
    commands = [run["command"] for run in results.get("runs", [])] or [results["command"]]
    corrected = "Budgets are corrected on the skipped model." if results["identity"]["correct"] else "τ from one pass."
    return (
        f"{text['windows']} windows of {text['window']:,} tokens of {text['name']}, {results['identity']['dtype']}, on "
        f"{where}; torch {used['torch']}, transformers {used['transformers']}. Unskipped perplexity "
        f"{results['dense']['perplexity']:.2f}. {corrected}{few}{unreached(results)}\n\n    "
        + "\n    ".join(commands)
        + "\n"
    )


def unreached(results: Results) -> str:
    """Methods that were asked for and neither measured nor refused: the run was stopped before them."""
    known = {cell["method"] for cell in results["cells"]} | set(results["refused"])
    left = [f"`{m}`" for m in results["grid"]["methods"] if m not in known]
    return f" The run was stopped before {', '.join(left)}." if left else ""


# ---- tables -------------------------------------------------------------------------------------------------------


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"


def shown(cell: Results | None) -> str:
    if cell is None:
        return "–"
    return f"{kl_of(cell):.4f}{'' if met(cell) else chr(92) + '*'} ({100 * cell['change']['value']:+.1f})"


def row(results: Results, method: str, gain: str) -> list[str] | None:
    cells = [cell_at(results, method, gain, budget) for budget in results["grid"]["budgets"]]
    return [f"`{method}`", *map(shown, cells)] if any(cells) else None


def budgets_of(results: Results) -> list[str]:
    return [f"{100 * b:g} %" for b in results["grid"]["budgets"]]


def quality(results: Results, gain: str) -> str:
    """Methods by their KL at 50 %, best first; the oracles, which save nothing, last."""

    def place(method: str) -> tuple[bool, float]:
        cell = cell_at(results, method, gain, 0.5)
        return method in results["references"], kl_of(cell) if cell else float("inf")

    rows = [made for m in sorted(results["grid"]["methods"], key=place) if (made := row(results, m, gain))]
    return table(["method", *budgets_of(results)], rows)


def gains(results: Results) -> list[str]:
    """What was measured with every gain."""
    known = {m: [row(results, m, g) for g in results["grid"]["gains"]] for m in results["grid"]["methods"]}
    rows = [
        [made[0], gain, *made[1:]]
        for found in known.values()
        if all(found) and len(found) > len(GAINS)
        for gain, made in zip(results["grid"]["gains"], found, strict=True)
        if made
    ]
    return ["### Gains\n", table(["method", "gain", *budgets_of(results)], rows)] if rows else []


def refusals(results: Results) -> list[str]:
    lines = []
    for method, refused in results["refused"].items():
        budgets = ", ".join(map(percent, refused["budgets"]))
        lines.append(f"`{method}` at {budgets}: {refused['reason']}")
    return ["### Budgets that were refused\n", bullets(lines)] if lines else []


def rivals(results: Results) -> list[str]:
    """Paired changes against the plain gate share, which needs no table."""
    rows = []
    for gain in (g for g in GAINS if g in results["grid"]["gains"]):
        for method in RIVALS:
            found = [paired(results, method, "share", gain, b) for b in results["grid"]["budgets"]]
            if any(found):
                rows.append([f"`{method}`", gain, *("–" if c is None else in_per_cent(c) for c in found)])
    head = "Change of KL against `share` at the same gain and budget, in per cent, with its 95 % interval.\n"
    return ["### Against a plain gate share\n", head, table(["method", "gain", *budgets_of(results)], rows)]


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
                     percent(r["realised"], 1), change])  # fmt: skip
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
    columns = list(map(percent, budgets))
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


def page() -> str:
    return written(DOCUMENT, measured=measured(RESULTS))


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
