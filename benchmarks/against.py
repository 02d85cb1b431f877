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
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # behind the version's own

from versions import HERE, Version, serve

ROUNDS = 7


# ---- the process of one version -----------------------------------------------------------------------------------------


class Worker:
    """Holds a model with a plan attached; knows only what both versions have."""

    def __init__(self, shape: str, layers: int | None, device: str):
        from ace_moe import ACE, build_plan
        from ace_moe.bench.shapes import build

        self.model = build(shape, device, layers)
        self.ace = ACE(build_plan(self.model))
        self.ace.attach(self.model)
        self.timed: Any = None

    def prepare(self, what: str, tokens: int, batch: int) -> None:
        import torch

        from ace_moe.bench import latency

        torch._dynamo.reset()
        self.timed, made = None, latency.Steps if what == "tpot" else latency.Prompt
        try:
            from ace_moe.bench.tokens import random_tokens
        except ImportError:  # versions that draw the same tokens themselves
            self.timed = made(self.model, batch, tokens)
        else:
            draw, more = random_tokens(self.model, seed=int(what == "tpot")), latency.STEPS if what == "tpot" else 0
            self.timed = made(self.model, draw(batch, tokens + more))

    def settle(self, ratio: float) -> float:
        """τ that realises the ratio at this size; bisection by hand, since its place differs between versions."""
        low, high = 0.0, 1.0
        for _ in range(16 if ratio else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.time(middle)[1] < ratio else (low, middle)
        return (low + high) / 2 if ratio else 0.0

    def time(self, tau: float, repeats: int = 1) -> tuple[float, float]:
        """(milliseconds, realised ratio)."""
        self.ace.set_threshold(tau)
        self.ace.reset()
        found = self.timed.time(repeats)
        return (found.wall if found.gpu is None else found.gpu), self.ace.realised


# ---- the comparison -----------------------------------------------------------------------------------------------------


def measure(pair: dict[str, Version], size: tuple[str, int, int], ratios: list[float]) -> list[dict[str, Any]]:
    for version in pair.values():
        version.prepare(*size)
    rows = []
    for ratio in ratios:
        tau = pair["this"].settle(ratio)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in pair}
        for _ in range(ROUNDS):
            for name, version in pair.items():
                found[name].append(version.time(tau, 3))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decode", default="1,4,16,64")
    parser.add_argument("--prefill", default="1024x4")
    parser.add_argument("--skip", default="0,0.6")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
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
        if options.out:
            options.out.write_text(json.dumps({"command": command(options), "rows": rows}, indent=1) + "\n")
    for version in pair.values():
        version.end()


def command(options: argparse.Namespace) -> str:
    flags = f"--shape {options.shape} --decode {options.decode} --prefill {options.prefill} --skip {options.skip}"
    return f"python benchmarks/against.py OTHER {flags}"


if __name__ == "__main__":
    main()
