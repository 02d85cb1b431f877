"""Thresholds from text that the model writes itself, kept fixed on other texts: what they realise.

python benchmarks/own_text.py MODEL … --texts wikipedia.jsonl books.jsonl code.jsonl docs.jsonl [--out FILE]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from running import made_here, parser, store
from transformers import PreTrainedModel

from ace_moe import build_plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.files import hashes
from ace_moe.mapping import Mapped, Passes, TextSource, map_budgets
from ace_moe.mapping.passes import attached
from ace_moe.policies import make
from ace_moe.provenance import provenance
from ace_moe.text import Text

BUDGETS = (0.3, 0.5, 0.6)
EACH = {0.3: 0.07, 0.5: 0.04, 0.6: 0.04}  # how far a text's ratio may be from the request
MEAN = 0.025


def realised(model: PreTrainedModel, mapped: Mapped, source: Path, texts: list[Path], tokens: int) -> dict[str, Any]:
    """By text, the ratio of each mapped threshold, executed."""
    found = {}
    with attached(model, mapped.plan, mapped.passes.policy) as deciders:
        for text in texts:
            passes = Passes(deciders, model, TextSource(source, Text.of(text), tokens=tokens).windows(model), batch=4)
            found[text.stem] = {f"{fit.budget:g}": passes(fit.threshold).ratio(fit.threshold) for fit in mapped.fits}
    return found


def judge(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The worst text and the mean of all at each budget, as distances from the request."""
    judged = {}
    for budget in BUDGETS:
        off = [row[f"{budget:g}"] - budget for row in rows.values()]
        worst, mean = max(off, key=abs), sum(off) / len(off)
        judged[f"{budget:g}"] = {"worst": worst, "mean": mean, "met": abs(worst) <= EACH[budget] and abs(mean) <= MEAN}
    return judged


def main() -> None:
    made = parser(__doc__, policies=["share", "ace"], tokens=16384)
    made.add_argument("models", type=Path, nargs="+")
    made.add_argument("--texts", type=Path, nargs="+", required=True)
    options = made.parse_args()
    record = provenance(inputs=hashes(options.texts))
    result = made_here(rows=[], provenance=record)
    for source in options.models:
        model, plan = load_model(source), build_plan(source)
        windows = TextSource(source).windows(model)
        for policy in options.policies:
            mapped = map_budgets(model, plan, make(policy), windows, BUDGETS, batch=8)
            rows = realised(model, mapped, source, options.texts, options.tokens)
            row = {"model": source.name, "policy": policy, "own": windows.workload.sha256, "realised": rows}
            result["rows"].append({**row, "judged": judge(rows)})
            print(json.dumps(result["rows"][-1]), flush=True)
            store(options.out, result)


if __name__ == "__main__":
    main()
