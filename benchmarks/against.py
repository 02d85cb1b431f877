"""Two versions of this package timed in one run: each in a process of its own that holds the model, asked in turn.

    python benchmarks/against.py OTHER --decode 1,4,16,64 --prefill 1024x4 --skip 0,0.6 -o against_h200.json

`OTHER` is the folder of the version to compare with (`git worktree add OTHER COMMIT`). Both decide by the same
thresholds, found with this version, so both run the same slots; each round times one after the other, and what is compared
are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # behind the version's own

from running import in_turn, made_here, parser, settled, store
from versions import HERE, Version, serve

ROUNDS = 7


# ---- the process of one version -----------------------------------------------------------------------------------------


class Worker:
    """Holds a model with a plan attached; knows only what both versions have."""

    def __init__(self, shape: str, layers: int | None, device: str):
        from ace_moe import ACE, build_plan

        self.model = bench("shapes").build(shape, device, layers)
        self.ace = ACE(build_plan(self.model), policy="share")
        self.ace.attach(self.model)
        self.timed: Any = None

    def prepare(self, what: str, tokens: int, batch: int) -> None:
        import torch

        latency = bench("latency")
        torch._dynamo.reset()
        self.timed = None
        made: Any = latency.Steps if what == "tpot" else latency.Prompt  # versions differ in what they take
        draw = bench("tokens").random_tokens(self.model, seed=int(what == "tpot"))
        self.timed = made(self.model, draw(batch, tokens + (latency.STEPS if what == "tpot" else 0)))

    def settle(self, ratio: float) -> float:
        return settled(lambda tau: self.time(tau)[1], ratio, 16)

    def time(self, tau: float, repeats: int = 1) -> tuple[float, float]:
        """(milliseconds, realised ratio)."""
        self.ace.set_threshold(tau)
        self.ace.reset()
        found = self.timed.time(repeats)
        return (found.wall if found.gpu is None else found.gpu), self.ace.realised


def bench(name: str) -> Any:
    """A module of the benchmarks, wherever the version has it."""
    try:
        return import_module(f"ace_moe.lab.bench.{name}")
    except ImportError:
        return import_module(f"ace_moe.bench.{name}")


# ---- the comparison -----------------------------------------------------------------------------------------------------


def measure(pair: dict[str, Version], size: tuple[str, int, int], ratios: list[float]) -> list[dict[str, Any]]:
    for version in pair.values():
        version.prepare(*size)
    rows = []
    for ratio in ratios:
        tau = pair["this"].settle(ratio)
        found = in_turn({name: partial(version.time, tau, 3) for name, version in pair.items()}, ROUNDS)
        ms = {name: statistics.median(t for t, _ in times) for name, times in found.items()}
        realised = {name: times[-1][1] for name, times in found.items()}
        row = {"what": size[0], "tokens": size[1], "batch": size[2], "ratio": ratio, "threshold": tau}
        rows.append(row | {"ms": ms, "realised": realised, "this_over_other": ms["this"] / ms["other"]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def sizes(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    prompts = [part.split("x") for part in options.prefill.split(",") if part]
    steps = [("tpot", 256, int(batch)) for batch in options.decode.split(",") if batch]
    return [*steps, *(("ttft", int(tokens), int(batch)) for tokens, batch in prompts)]


def main() -> None:
    made = parser(__doc__, shape="qwen3-30b-a3b", device="cuda", decode="1,4,16,64", prefill="1024x4", skip="0,0.6")
    made.add_argument("other", type=Path, nargs="?")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--layers", type=int)
    options = made.parse_args()
    if options.serve:
        return serve(Worker(options.shape, options.layers, options.device))
    flags = ["--shape", options.shape, "--device", options.device]
    flags += ["--layers", str(options.layers)] if options.layers else []
    roots = {"this": HERE, "other": options.other.resolve()}
    pair = {name: Version(__file__, root, flags) for name, root in roots.items()}
    for version in pair.values():
        version.wait()
    rows: list[dict[str, Any]] = []
    for size in sizes(options):
        rows += measure(pair, size, [float(r) for r in options.skip.split(",")])
        store(options.out, made_here(rows=rows))
    for version in pair.values():
        version.end()


if __name__ == "__main__":
    main()
