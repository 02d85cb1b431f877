"""What restored slots and thresholds that keep a budget cost, and what large budgets give: TPOT on one GPU, by shape.

    python benchmarks/restore.py --routing uniform skewed -o benchmarks/results/restore_h200.json

One model, one recorded decode step for each way: the plain rule, with restored slots, with thresholds that move.
All ways of a size use the same threshold, found with the plain rule so that it skips the wanted ratio, and are timed in turn;
ratios are of medians. `ran` is the share of routed slots that was executed, `reads` how many experts a layer read a step.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from running import bare_plan, in_turn, made_here, parser, settled, store

from ace_moe import ACE
from ace_moe.checkpoint import MoEModel
from ace_moe.lab.bench.latency import STEPS, Steps
from ace_moe.lab.bench.routers import shape_routers
from ace_moe.lab.bench.shapes import build
from ace_moe.lab.bench.tokens import random_tokens
from ace_moe.plan import Plan
from ace_moe.provenance import provenance

WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "restored": {"restore": True}, "tracked": {"control": "track"}
}  # fmt: skip
ROUNDS, PROMPT = 5, 256


class Way:
    """A recorded decode step of one way to decide. The model is detached again: a graph needs tensors alone."""

    def __init__(self, model: Any, plan: Plan, batch: int, options: dict[str, Any], **steps: Any):
        """`steps` go to the decoder."""
        self.ace = ACE(plan, 0.5 if "control" in options else 0.0, policy="share", **options)
        self.slots = batch * MoEModel.of(model).sites[0].top_k
        with self.ace(model):
            self.steps = Steps(model, random_tokens(model)(batch, PROMPT + STEPS), **steps)

    def time(self, tau: float, skip: float = 0.0) -> float:
        """Milliseconds; a way that tracks starts from the same threshold and keeps the ratio."""
        targets = torch.full((3,), skip) if self.ace.control == "track" and skip else None
        self.ace.deciders.set(torch.full((3,), tau), targets=targets)
        self.ace.reset()
        return self.steps.time(1).ms

    def skipped(self, tau: float) -> float:
        self.time(tau)
        return self.ace.report()["decode"]["skipped"]

    def facts(self) -> dict[str, Any]:
        report = self.ace.report()
        entry, reads = report["decode"], report.get("reads", {}).get("generated")
        found = {"skipped": entry["skipped"], "ran": 1 - entry["realised"]}
        if reads is None:
            return found
        steps = entry["routed"] / self.slots  # of a layer each
        return found | {"reads": reads["read"] / steps, "asked": reads["asked"] / steps}


def measure(ways: dict[str, Way], skip: float, batch: int) -> dict[str, Any]:
    tau = settled(ways["plain"].skipped, skip, 10)
    times = in_turn({name: partial(way.time, tau, skip) for name, way in ways.items()}, ROUNDS)
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
    sizes: dict[str, Any] = {"batches": [1, 4, 16, 64], "skip": [0.0, 0.3, 0.6]}
    made = parser(__doc__, shape="qwen3-30b-a3b", device="cuda", routing=["uniform", "skewed"], **sizes)
    made.add_argument("--layers", type=int)
    made.add_argument(
        "--large", type=float, nargs="*", default=[0.75, 0.85], help="further ratios at the largest batch"
    )
    made.add_argument(
        "--tracked", type=int, nargs="*", default=[1, 16], help="batches with moving thresholds, uniform alone"
    )
    options = made.parse_args()
    model, rows = build(options.shape, options.device, options.layers), []
    base = 0.0
    for routing in options.routing:
        shape_routers(model, routing)
        plan = bare_plan(model, options.shape)
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
                record = {"layers": len(plan.tables), "provenance": provenance(options.device)}
                store(options.out, made_here(**record, rows=rows))


if __name__ == "__main__":
    main()
