"""What `aligned` is worth: KL with it and without, over the gains `kept` and `power`, beside the mean of skipped experts.

    python benchmarks/aligned.py MODEL … --map wiki103.valid.txt --text wiki.test.raw [--device cuda] [-o FILE]
    python benchmarks/aligned.py --page

τ and statistics come from one text, KL is measured on another, with skipped slots not run. A model that is in the file already
is measured again. `--page` writes the table of docs/tuning.md from what is stored.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pages
from pages import DOCS, RESULTS, Row, percent
from running import parser, store
from study_claims import over

from ace_moe import ACE, build_plan
from ace_moe.evaluate.compare import MEASURES
from ace_moe.fidelity import Reference
from ace_moe.files import hashes
from ace_moe.loading import load_model, load_tokenizer, load_windows
from ace_moe.plan import Plan
from ace_moe.planning import map_budgets
from ace_moe.policies import TokenPolicy, make
from ace_moe.provenance import provenance
from ace_moe.scoring import predict, score
from ace_moe.statistics import relative_change, token_interval

STORED, PAGE = RESULTS / "aligned.json", DOCS / "tuning.md"
WAYS: dict[str, dict[str, Any]] = {
    "ace, kept": {"policy": "ace", "gain": "kept"},
    "ace, kept, aligned": {"policy": "ace", "gain": "kept", "compensate": "aligned"},
    "share, power": {"policy": "share"},
    "share, power, aligned": {"policy": "share", "gain": "aligned"},
    "share, power, mean": {"policy": "share", "compensate": "mean"},
}
PAIRS = {"ace, kept, aligned": "ace, kept", "share, power, aligned": "share, power"}
TABLE = """KL on {windows} × {window:,} tokens of {text}; τ and statistics from {map}; \
skipped slots are not run. Last columns: KL with `aligned` over KL without, by window, with 95 % intervals.

{table}
At 50 % it is 5 % or more below the mean of skipped experts on {clear} of {models} models \
({named}). Kernels and servers would have to run it if that were three of four.
"""


def executed(model: Any, plan: Plan, policy: TokenPolicy, budget: float, subject: Row) -> Row:
    """The attached model on the measured text, held against itself with nothing skipped."""
    with ACE(plan, budget, policy=policy, dispatch="torch")(model) as ace:

        def whole(number: int, ids: Any) -> Any:
            def compute() -> Any:
                with ace.runtime.aside():
                    return predict(model, ids)

            return subject["reference"].of(number, compute)

        found = score(model, subject["windows"], subject["batch"], whole)
        assert found.fidelity is not None
        means = {n: token_interval(getattr(found.fidelity, n), found.by_window).value for n in MEASURES}
        by_window = [round(x, 5) for x in found.fidelity.kl]
        return {**means, "perplexity": found.perplexity, "realised": ace.realised, "by_window": by_window}


def measured(path: Path, options: argparse.Namespace) -> list[Row]:
    model, tokenizer, plan = load_model(path, options.device), load_tokenizer(path), build_plan(path)
    learned, windows = (
        load_windows(model, tokenizer, text, options.window, options.tokens) for text in (options.map, options.text)
    )
    subject, rows = {"windows": windows, "batch": options.batch, "reference": Reference()}, []
    for name, settings in WAYS.items():
        policy = make(**settings)
        assert isinstance(policy, TokenPolicy)
        plan = map_budgets(model, plan, policy, learned, options.budgets, batch=options.batch, correct=True).plan
        for budget in options.budgets:
            cell = executed(model, plan, policy, budget, subject)
            rows.append({"model": path.name, "way": name, "budget": budget, **cell})
            print(f"{path.name} {budget:.0%} {name}: KL {cell['kl']:.4f}, {cell['realised']:.2%} skipped", flush=True)
    return rows


def cell(rows: list[Row], model: str, way: str, budget: float) -> Row:
    return next(r for r in rows if (r["model"], r["way"], r["budget"]) == (model, way, budget))


def table(stored: Row) -> str:
    rows, lines = stored["rows"], []
    models = [m for m in pages.MODELS if any(r["model"] == m for r in rows)]
    for model, budget in ((m, b) for m in models for b in stored["budgets"]):
        kls = [f"{cell(rows, model, way, budget)['kl']:.4f}" for way in WAYS]
        pairs = [[cell(rows, model, w, budget)["by_window"] for w in pair] for pair in PAIRS.items()]
        changes = [relative_change(*pair) for pair in pairs]
        lines.append([f"{model}, {percent(budget)}", *kls, *map(over, changes)])
    made = pages.table(["model, budget", *WAYS, "over `kept`", "over `power`"], lines)
    at_half = {m: [cell(rows, m, f"share, power, {way}", 0.5)["kl"] for way in ("aligned", "mean")] for m in models}
    clear = [m for m, (mine, mean) in at_half.items() if mine <= 0.95 * mean]
    counted = {"clear": len(clear), "models": len(models), "named": ", ".join(clear) or "–"}
    return TABLE.format(**stored, table=made, **counted)


def page() -> str:
    return pages.written(PAGE, aligned=table(pages.load(STORED.name)))


def main() -> None:
    made = parser(__doc__, budgets=[0.3, 0.5], window=1024, batch=1, device="cpu", page=False)
    made.add_argument("models", type=Path, nargs="*")
    made.add_argument("--map", type=Path, help="text of τ and statistics")
    made.add_argument("--text", type=Path, help="measured text")
    made.add_argument("--tokens", type=int, default=32768, help="of each text")
    made.set_defaults(out=STORED)
    options = made.parse_args()
    if options.page:
        PAGE.write_text(page(), encoding="utf-8")
    for path in options.models:
        record = provenance(options.device, hashes((options.map, options.text)))
        sizes = {"budgets": options.budgets, "window": options.window, "windows": options.tokens // options.window}
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        rows = [r for r in before.get("rows", []) if r["model"] != path.name] + measured(path, options)
        runs = [r for r in before.get("runs", []) if r["model"] != path.name] + [{"model": path.name, **record}]
        texts = {"map": options.map.name, "text": options.text.name}
        store(options.out, {"kind": "aligned", **texts, **sizes, "runs": runs, "rows": rows})


if __name__ == "__main__":
    main()
