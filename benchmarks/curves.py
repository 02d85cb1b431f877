"""Budgets that were never mapped, executed: how far what they realise is from the request.

python benchmarks/curves.py MODEL … --text wiki103.valid.txt [--other wiki.test.raw] [--out FILE]

Measured at 10–80 % by tens; then 16 seeded budgets between 1 % and the limit are answered from the plan and run. On `other`
a budget is compared with the nearest mapped one: both carry the same text's thresholds there. A file that is there goes on.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from running import parser, store
from transformers import PreTrainedModel

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import default_device, load_model
from ace_moe.files import hashes
from ace_moe.mapping import Passes, map_budgets, text_for
from ace_moe.mapping.passes import attached
from ace_moe.plan import Plan
from ace_moe.policies import Policy, make
from ace_moe.provenance import provenance
from ace_moe.text import Windows

MAPPED = [round(0.1 * n, 1) for n in range(1, 9)]
COUNT = 16
Row = dict[str, Any]


def budgets(limit: float) -> list[float]:
    drawn = torch.rand(COUNT, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return sorted(round(b, 4) for b in (0.01 + drawn * (limit - 0.011)).tolist())


def bar(budget: float, stated: float) -> float:
    return 0.0015 if budget <= 0.6 else 0.0025 if budget <= 0.8 else stated


def executed(model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, batch: int) -> list[Row]:
    """Each budget as it was answered and as it was realised on the text of the curve."""
    limit = plan.curves[-1].limit
    rows = []
    with attached(model, plan, policy) as runtime:
        passes = Passes(runtime, model, windows, batch)
        for budget in budgets(limit):
            found = plan.lookup(policy.settings, budget)
            realised = passes(found.threshold).ratio(found.threshold)
            within = abs(realised - budget) <= bar(budget, found.error or 0.0)
            row = {"budget": budget, "how": found.how, "stated": found.error}
            rows.append({**row, "realised": realised, "met": within})
            print(rows[-1], flush=True)
    return rows


def carried(model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, batch: int) -> list[Row]:
    """On another text: a budget's miss beside that of the mapped budget next to it."""
    rows = []
    with attached(model, plan, policy) as runtime:
        passes = Passes(runtime, model, windows, batch)

        def miss(budget: float) -> float:
            tau = plan.lookup(policy.settings, budget).threshold
            return passes(tau).ratio(tau) - budget

        mapped = {budget: miss(budget) for budget in MAPPED}
        for budget in budgets(plan.curves[-1].limit):
            nearest = min(MAPPED, key=lambda b: abs(b - budget))
            row = {"budget": budget, "miss": miss(budget), "nearest": nearest, "its_miss": mapped[nearest]}
            rows.append({**row, "met": abs(row["miss"]) <= abs(row["its_miss"]) + 0.001})
            print(rows[-1], flush=True)
    return rows


def switch(plan: Plan, policy: Policy, model: PreTrainedModel) -> Row:
    """`set_skip` to budgets that were never mapped: calls of the model, and time."""
    ace, calls = ACE(plan, 0.5, policy=policy), []
    with ace(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
        start = time.perf_counter()
        for budget in budgets(plan.curves[-1].limit):
            ace.set_skip(budget)
        seconds = (time.perf_counter() - start) / COUNT
        handle.remove()
    return {"model_calls": len(calls), "seconds": seconds}


def study(source: Path, options: argparse.Namespace) -> Row:
    model, policy = load_model(source), make(options.policy)
    windows = text_for(model, source, options.text, tokens=options.tokens)
    start = time.perf_counter()
    plan = map_budgets(model, build_plan(source), policy, windows, MAPPED, batch=options.batch).plan
    row: Row = {"model": source.name, "policy": options.policy, "limit": plan.curves[-1].limit}
    row |= {"points": plan.curves[-1].points.shape[1], "bytes": plan.curves[-1].points.nbytes}
    row |= {"mapping_seconds": time.perf_counter() - start, "set_skip": switch(plan, policy, model)}
    row["mapped"] = [{"budget": t.budget, "threshold": t.threshold, "realised": t.realised} for t in plan.thresholds]
    row["rows"] = executed(model, plan, policy, windows, options.batch)
    if options.other:
        other = text_for(model, source, options.other, tokens=options.tokens // 4)
        row["carried"] = carried(model, plan, policy, other, options.batch)
    return row


def main() -> None:
    made = parser(__doc__, policy="share", tokens=65536, batch=4)
    made.add_argument("models", type=Path, nargs="+")
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--other", type=Path)
    options = made.parse_args()
    there = options.out and options.out.exists()
    result: Row = json.loads(options.out.read_text()) if there else {"runs": [], "studies": []}
    texts = [text for text in (options.text, options.other) if text is not None]
    record = provenance(default_device(), hashes(texts))
    result["runs"].append({"models": [m.name for m in options.models], **record})
    for source in options.models:
        result["studies"].append(study(source, options))
        store(options.out, result)


if __name__ == "__main__":
    main()
