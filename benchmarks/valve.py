"""The budget under load: 16 requests decode, 16 more come, then they leave; steps timed with the valve and without.

    python benchmarks/valve.py --layers 24 --out benchmarks/results/valve_h200.json
    python benchmarks/valve.py --tiny --eager --cache 0.25 --memory 0.3 --length 1024 --few 2 --many 4      # on a CPU

First the steps with the budget fixed at its lower and its upper bound, with few and with many requests. The target is set
between what many requests take at the one and at the other, so that only a budget that rises can hold it. Then few → many →
few with the valve, its moves written down. The engine core runs in this process, so that one start serves all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from running import engine_options, made_here, parser, store

from ace_moe.engines.vllm import engine_args
from ace_moe.engines.vllm.control import report, reset, set_skip
from serving import QWEN3_30B, TINY, start, write_model, write_plan

LOW, HIGH, PROMPT = 0.3, 0.7, 64


class Load:
    """An engine stepped by hand, so that requests come and go while others decode."""

    def __init__(self, llm: Any, vocabulary: int):
        self.llm, self.engine, self.vocabulary, self.sent, self.done = llm, llm.llm_engine, vocabulary, 0, 0

    def add(self, requests: int, tokens: int) -> None:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for _ in range(requests):
            prompt = [10 + (self.sent * 7919 + 31 * j) % (self.vocabulary - 10) for j in range(PROMPT)]
            self.engine.add_request(str(self.sent), TokensPrompt(prompt_token_ids=prompt), params)
            self.sent += 1

    def steps(self, count: int | None = None) -> list[float]:
        """Milliseconds of each step; until nothing is left where no count is given."""
        times: list[float] = []
        while self.engine.has_unfinished_requests() and (count is None or len(times) < count):
            began = time.perf_counter()
            self.done += sum(out.finished for out in self.engine.step())
            times.append(1e3 * (time.perf_counter() - began))
        return times


def fixed(load: Load, budget: float, requests: int) -> float:
    """Median milliseconds of a step at a fixed budget."""
    set_skip(load.llm, budget)
    load.add(requests, 80)
    return statistics.median(load.steps()[16:])


def thresholds(sizes: dict[str, Any]) -> dict[float, float]:
    """τ of each budget the valve may ask for: logits of random router rows on normalised inputs are Gaussian."""
    spread = 0.02 * sizes["hidden_size"] ** 0.5
    logits = torch.randn(50_000, sizes["num_experts"], generator=torch.Generator().manual_seed(0)) * spread
    gates = logits.softmax(-1).topk(sizes["num_experts_per_tok"]).values
    shares = (gates / gates.sum(-1, keepdim=True)).flatten().sort().values
    return {b: float(shares[int(b * len(shares))]) for b in (round(LOW + 0.05 * n, 2) for n in range(9))}


def held(load: Load, valve: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Few, many, few again, in windows of the valve's length."""
    from ace_moe.engines.vllm.controller import WINDOW

    rows: list[dict[str, Any]] = []
    many = options.windows * WINDOW
    load.add(options.few, 3 * many)
    for phase in ("few", "many", "few again"):
        if phase == "many":
            load.add(options.many - options.few, many)
        for _ in range(options.windows):
            times = load.steps(WINDOW)
            rows.append({"phase": phase, "ms": statistics.median(times), "budget": valve.budget})
    load.steps()
    return rows


def main() -> None:
    made = engine_options(parser(__doc__, tiny=False, few=16, many=32), memory=0.46, cache=8.0, length=2048)
    made.add_argument("--layers", type=int)
    made.add_argument("--windows", type=int, default=14, help="of the valve, for each load")
    options = made.parse_args()
    sizes = dict(TINY if options.tiny else QWEN3_30B)
    sizes |= {"num_hidden_layers": options.layers} if options.layers else {}
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, sizes, Path(folder))))


def measure(options: argparse.Namespace, sizes: dict[str, Any], folder: Path) -> dict[str, Any]:
    plan = write_plan(folder / "plan.safetensors", sizes, thresholds(sizes))
    given = {"allow_other_weights": True, "policy": "share", "skip_max": HIGH, "target_tpot": 1000}
    llm = start(write_model(folder / "model", sizes), options, **engine_args(plan, LOW, **given))
    load = Load(llm, int(sizes["vocab_size"]))
    core = llm.llm_engine.engine_core.engine_core
    load.add(options.many, 40)
    load.steps()  # warms up, and makes the controller
    found = {f"{n} at {b:.0%}": fixed(load, b, n) for n in (options.few, options.many) for b in (LOW, HIGH)}
    slow, fast = found[f"{options.many} at {LOW:.0%}"], found[f"{options.many} at {HIGH:.0%}"]
    target = fast + 0.35 * (slow - fast)
    valve = core.ace_controller
    valve.target, valve.budget = target / 1e3, LOW
    set_skip(llm, LOW)
    reset(llm)
    rows = held(load, valve, options)
    facts = {"fixed_ms": found, "target_ms": target, "sent": load.sent, "finished": load.done, "rows": rows}
    facts |= made_here(report=report(llm))
    for row in rows:
        print(f"{row['phase']:<10} {row['ms']:7.3f} ms of {target:.3f}  budget {row['budget']:.0%}", flush=True)
    store(options.out, facts)
    return {key: facts[key] for key in ("fixed_ms", "target_ms", "sent", "finished")}


if __name__ == "__main__":
    main()
