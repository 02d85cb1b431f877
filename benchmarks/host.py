"""Experts in host memory: TPOT with all, half or none of them beside the GPU, unskipped and skipped, by shape.

    python benchmarks/host.py --layers 4 -o benchmarks/results/host_h200.json

Ways are recorded one after the other and timed in turn. `rate` is the bytes of experts that crossed the bus in a step (counted:
experts read that have no copy beside the GPU) over the whole step's time, to be held against a pinned copy's. With skewed
routing the copies are the experts that a prompt used most.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from running import bare_plan, in_turn, made_here, parser, settled, store

from ace_moe import ACE
from ace_moe.engines.transformers.experts import HOST
from ace_moe.engines.transformers.host import hosted, place_experts, settle
from ace_moe.lab.bench.latency import STEPS, Steps, once
from ace_moe.lab.bench.routers import shape_routers
from ace_moe.lab.bench.shapes import build
from ace_moe.lab.bench.tokens import random_tokens

PROMPT, ROUNDS = 256, 5


def copy_rate() -> float:
    """Bytes a second of a pinned copy to the GPU."""
    here = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(here, device="cuda")
    found = [once(lambda: there.copy_(here, non_blocking=True), there.device) for _ in range(6)]
    return here.nbytes / min(gpu for _, gpu in found if gpu is not None) * 1e3


class Way:
    """A model whose experts are at one place, with its recorded step."""

    def __init__(self, options: argparse.Namespace, routing: str, batch: int, resident: float | None):
        self.model = build(options.shape, "cuda", options.layers)
        shape_routers(self.model, routing)
        plan = bare_plan(self.model, options.shape)
        if resident is not None:
            place_experts(self.model, "cuda", resident)
        self.ace = ACE(plan, policy="share", reads=True)
        self.ace.attach(self.model)
        draw = random_tokens(self.model)
        if resident:
            with torch.no_grad():
                settle(self.model, lambda: self.model(input_ids=random_tokens(self.model, seed=5)(4, PROMPT)))
        self.steps = Steps(self.model, draw(batch, PROMPT + STEPS))

    def time(self, tau: float) -> float:
        self.ace.set_threshold(tau)
        self.ace.reset()
        return self.steps.time(2).ms

    def skipped(self, tau: float) -> float:
        self.time(tau)
        return self.ace.report()["decode"]["skipped"]

    def far(self, batch: int) -> float:
        """Bytes of experts without a copy that a step needs: what each layer keeps in torch, on the same tokens."""
        module: Any = next(iter(hosted(self.model)), None)
        if module is None:
            return 0.0
        size = sum(p[0].nbytes for p in (module.gate_up_proj, module.down_proj))
        near = vars(module)[HOST].near
        part = 1.0 if near is None else self._missed()
        reads = self.ace.report()["reads"]["generated"]
        steps = (
            self.ace.report()["decode"]["routed"] / batch / len(hosted(self.model)) / module.config.num_experts_per_tok
        )
        return size * reads["read"] / steps * part

    def _missed(self) -> float:
        """The part of slots, by the router's own choice in one more prompt, whose expert has no copy."""
        seen: list[float] = []
        layers = [layer for layer in self._layers() if layer.owner() is not None]
        rows = [vars(layer.owner())[HOST].near.row for layer in layers]
        ends = [
            layer.observe(lambda routing, _, decision, row=row: seen.append(_far(row, routing, decision)))
            for layer, row in zip(layers, rows, strict=True)
        ]
        with torch.no_grad():
            self.model(input_ids=random_tokens(self.model)(4, PROMPT))
        for end in ends:
            end()
        return statistics.mean(seen)

    def _layers(self) -> list[Any]:
        return list(self.ace.deciders.values())


def _far(row: torch.Tensor, routing: Any, decision: Any) -> float:
    kept = routing.ids[decision.keep]
    return float((row[kept] < 0).float().mean())


def main() -> None:
    sizes: dict[str, Any] = {"routing": ["uniform", "skewed"], "batches": [1, 4], "skip": [0.0, 0.6]}
    options = parser(__doc__, shape="qwen3-30b-a3b", layers=4, **sizes).parse_args()
    rate, rows = copy_rate(), []
    print(f"pinned copy {rate / 1e9:.1f} GB/s", flush=True)
    for routing, batch in ((r, b) for r in options.routing for b in options.batches):
        torch._dynamo.reset()
        places = {"host": 0.0, "half": 0.5, "gpu": None}
        ways = {name: Way(options, routing, batch, resident) for name, resident in places.items()}
        for skip in options.skip:
            tau = settled(ways["gpu"].skipped, skip, 10)
            times = in_turn({name: partial(way.time, tau) for name, way in ways.items()}, ROUNDS)
            row: dict[str, Any] = {"routing": routing, "batch": batch, "skip": skip, "threshold": tau}
            row["ms"] = {name: statistics.median(found) for name, found in times.items()}
            row["skipped"] = {name: way.ace.report()["decode"]["skipped"] for name, way in ways.items()}
            row["far_bytes"] = {name: way.far(batch) for name, way in ways.items()}
            row["rate"] = {n: row["far_bytes"][n] / ms * 1e3 for n, ms in row["ms"].items() if row["far_bytes"][n]}
            rows.append(row)
            text = "  ".join(f"{n} {ms:.3f} ms {row['rate'].get(n, 0) / rate:.0%}" for n, ms in row["ms"].items())
            print(f"{routing:8} batch {batch} skip {skip:.0%}: {text}", flush=True)
            store(options.out, made_here(copy_rate=rate, rows=rows))
        del ways


if __name__ == "__main__":
    main()
