"""Decode steps whose layers are rewritten (`Decoder(…, fused=True)`) against the same compiled as they are, in one process.

    python benchmarks/fused.py --batches 1 4 --profile -o benchmarks/results/fused_h200.json

Both decide by the same thresholds, found with the layers as they are, and are timed in turn; medians over rounds. `--profile`:
the kernels of one layer in order, with the microseconds each began and took (under the profiler, which slows all a little;
a kernel's time has in it what it waits for the one in front).
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from restore import Way
from running import bare_plan, in_turn, made_here, parser, settled, store

from ace_moe.lab.bench.shapes import build

ROUNDS = 9


def recorded(model: Any, plan: Any, batch: int, fused: bool) -> Way:
    torch._dynamo.reset()
    return Way(model, plan, batch, {}, fused=fused)


def kernels(way: Way, tau: float) -> list[tuple[str, float, float]]:
    """(name, began, took) of the kernels between two attentions in the middle of a step."""
    from torch.profiler import ProfilerActivity, profile

    way.time(tau)
    way.steps.rewind()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        way.steps.run()
        torch.cuda.synchronize()
    ran = [(e.name, e.time_range) for e in seen.events() if e.device_type.name == "CUDA"]
    ran.sort(key=lambda one: one[1].start)
    marks = [i for i, (name, _) in enumerate(ran) if name == "attend"]
    first, last = list(pairwise(marks))[len(marks) // 2]
    start = ran[first][1].start
    return [(name[:60], t.start - start, t.end - t.start) for name, t in ran[first:last]]


def main() -> None:
    made = parser(__doc__, shape="qwen3-30b-a3b", device="cuda", batches=[1, 4], skip=[0.0, 0.6], profile=False)
    made.add_argument("--layers", type=int)
    options = made.parse_args()
    model, rows = build(options.shape, options.device, options.layers), []
    plan = bare_plan(model, options.shape)
    for batch in options.batches:
        ways = {name: recorded(model, plan, batch, name == "fused") for name in ("plain", "fused")}
        for skip in options.skip:
            tau = settled(ways["plain"].skipped, skip, 12)
            times = in_turn({name: partial(way.time, tau) for name, way in ways.items()}, ROUNDS)
            ms = {name: statistics.median(found) for name, found in times.items()}
            row: dict[str, Any] = {"shape": options.shape, "batch": batch, "skip": skip, "threshold": tau, "ms": ms}
            row |= {"skipped": {name: way.ace.report()["decode"]["skipped"] for name, way in ways.items()}}
            row |= {"kernels": {name: kernels(way, tau) for name, way in ways.items()}} if options.profile else {}
            print(f"batch {batch} skip {skip:.0%} {ms} = {ms['plain'] / ms['fused']:.3f}x", flush=True)
            rows.append(row)
            store(options.out, made_here(layers=len(plan.tables), rows=rows))


if __name__ == "__main__":
    main()
