"""What restored slots and thresholds that keep a budget cost, and what large budgets give: TPOT on one GPU, by shape.

    python benchmarks/restore.py --routing uniform skewed -o benchmarks/results/restore_h200.json

One model, one recorded decode step for each way: the plain rule, with restored slots, with thresholds that move.
All ways of a size use the same threshold, found with the plain rule so that it skips the wanted ratio, and are timed in turn;
ratios are of medians. `ran` is the share of routed slots that was executed, `reads` how many experts a layer read a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from ace_moe import ACE
from ace_moe.bench.latency import STEPS, Steps
from ace_moe.bench.routers import shape_routers
from ace_moe.bench.shapes import build
from ace_moe.bench.tokens import random_tokens
from ace_moe.checkpoint import MoEModel
from ace_moe.plan import Plan
from ace_moe.provenance import provenance

WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "restored": {"restore": True}, "tracked": {"control": "track"}
}  # fmt: skip
ROUNDS, PROMPT = 5, 256


class Way:
    """A recorded decode step of one way to decide. The model is detached again: a graph needs tensors alone."""

    def __init__(self, model: Any, plan: Plan, batch: int, options: dict[str, Any]):
        self.ace = ACE(plan, 0.5 if "control" in options else 0.0, policy="share", **options)
        with self.ace(model):
            self.steps = Steps(model, random_tokens(model)(batch, PROMPT + STEPS))

    def time(self, tau: float, skip: float, repeats: int = 1) -> float:
        """Milliseconds; a way that tracks starts from the same threshold and keeps the ratio."""
        targets = torch.full((3,), skip) if self.ace.control == "track" and skip else None
        self.ace.runtime.set(torch.full((3,), tau), targets=targets)
        self.ace.reset()
        found = self.steps.time(repeats)
        return found.wall if found.gpu is None else found.gpu

    def facts(self) -> dict[str, Any]:
        report = self.ace.report()
        entry, reads = report["decode"], report.get("reads", {}).get("generated")
        found = {"skipped": entry["skipped"], "ran": 1 - entry["realised"]}
        return found | ({} if reads is None else {"reads": reads["read"], "asked": reads["asked"]})


def settle(way: Way, skip: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(10 if skip else 0):
        middle = (low + high) / 2
        way.time(middle, 0.0)
        low, high = (middle, high) if way.ace.report()["decode"]["skipped"] < skip else (low, middle)
    return high if skip else 0.0


def measure(ways: dict[str, Way], skip: float, batch: int) -> dict[str, Any]:
    tau = settle(ways["plain"], skip)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(way.time(tau, skip))
    row: dict[str, Any] = {"batch": batch, "skip": skip, "threshold": tau, "ms": {}, "facts": {}}
    for name, way in ways.items():
        row["ms"][name], row["facts"][name] = statistics.median(times[name]), way.facts()
    return row


def say(row: dict[str, Any], base: float) -> None:
    plain = row["ms"]["plain"]
    text = "  ".join(
        f"{n} {ms:.3f} ({ms / plain - 1:+.1%} of plain, {base / ms:.3f}x own 0 %)" for n, ms in row["ms"].items()
    )
    restored = row["facts"]["restored"]
    ran = f"ran {restored['ran']:.1%}, reads {restored['reads'] / max(1, restored['asked']):.3f}"
    print(f"{row['routing']:8} batch {row['batch']:>3} skip {row['skip']:.0%}  {text}  {ran}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--routing", nargs="+", default=["uniform", "skewed"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--skip", type=float, nargs="+", default=[0.0, 0.3, 0.6])
    parser.add_argument(
        "--large", type=float, nargs="*", default=[0.75, 0.85], help="further ratios at the largest batch"
    )
    parser.add_argument(
        "--tracked", type=int, nargs="*", default=[1, 16], help="batches with moving thresholds, uniform alone"
    )
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    model, rows = build(options.shape, options.device, options.layers), []
    base = 0.0
    for routing in options.routing:
        shape_routers(model, routing)
        moe = MoEModel.of(model)
        plan = Plan({site.key: {} for site in moe.sites}, moe.fingerprint(), options.shape)
        for batch in options.batches:
            torch._dynamo.reset()
            tracked = batch in options.tracked and routing == "uniform"
            names = ["plain", "restored", *(["tracked"] if tracked else [])]
            ways = {name: Way(model, plan, batch, WAYS[name]) for name in names}
            large = options.large if batch == max(options.batches) else []
            for skip in [*options.skip, *large]:
                row = {"routing": routing, **measure(ways, skip, batch)}
                base = base if skip else row["ms"]["plain"]
                say(row, base)
                rows.append(row)
                if options.out:
                    facts = {
                        "command": "python benchmarks/restore.py " + " ".join(sys.argv[1:]),
                        "layers": len(moe.sites),
                        "provenance": provenance(options.device),
                    }
                    facts["device"] = torch.cuda.get_device_name() if options.device == "cuda" else options.device
                    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
