"""Requests to `ace serve` on the CPU for as long as you like, in the environment that has vLLM:

    python tests/serving/endure.py --minutes 60

Rounds of requests, half of them with a budget of their own, while the server's budget changes; the
prefix cache is on. No reply may be an error, after each round the counters must be exact (routed = tokens × layers × k, for
prompts without what the cache had), and in its last third the server's memory must not be larger than in the second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
from serving_server import Server, serving

from ace_moe import build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.demo import MODEL, TEXT
from ace_moe.mapping import map_budgets
from ace_moe.plan import Plan
from ace_moe.policies import make

BUDGETS = (0.0, 0.2, 0.5, 0.6)
SLOTS = 6 * 8  # layers × k
AT_ONCE, A_ROUND = 8, 48
BLOCKS = "128"  # of the cache, which is full after a few rounds: pages of a large one come into use for hours
# Large blocks go back to the system at once: else what an allocator holds on to looks like a leak for hours.
ALLOCATOR = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MORE_MEMORY = 4 << 20  # bytes: caches of Python breathe


def mapped_plan() -> Plan:
    model = load_model(MODEL, device="cpu")
    windows = load_windows(model, load_tokenizer(MODEL), TEXT, 256, 2048)
    return map_budgets(model, build_plan(MODEL), make("share"), windows, [b for b in BUDGETS if b]).plan


def requests(rng: random.Random, text: str) -> list[dict[str, Any]]:
    """Prompts from a few places of the text, so that some begin alike and the cache has work."""
    made = []
    for _ in range(A_ROUND):
        start, length = rng.randrange(len(text) // 1000 - 1) * 1000, rng.choice((20, 200, 800))
        own = {"vllm_xargs": {"ace_skip": rng.choice(BUDGETS)}} if rng.random() < 0.5 else {}
        made.append({"prompt": text[start : start + length], "tokens": rng.choice((1, 2, 8, 24)), **own})
    return made


def tokens_run(replies: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens that went through the model: of prompts what no cache had, of replies all but the last."""
    usages = [reply["usage"] for reply in replies]
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages)
    prompts, made = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    return {"prefill": prompts - cached, "decode": made - len(usages), "cached": cached}


def one_round(server: Server, pool: ThreadPoolExecutor, rng: random.Random, text: str) -> dict[str, int]:
    status, answer = server.send("/ace", {"skip": rng.choice(BUDGETS), "reset": True})
    assert status == 200, answer
    jobs = [pool.submit(server.reply, **request) for request in requests(rng, text)]
    ran, found = tokens_run([job.result() for job in jobs]), json.loads(server.send("/ace")[1])
    for phase in ("prefill", "decode"):
        assert found[phase]["routed"] == ran[phase] * SLOTS, (phase, found[phase], ran)
    return ran


def memory(pid: int) -> int:
    """Bytes of the server and all its processes."""
    server = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


def run(minutes: float, seed: int) -> dict[str, Any]:
    rng, text, totals, sizes = random.Random(seed), TEXT.read_text(encoding="utf-8"), dict[str, int](), list[int]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        plan = mapped_plan().save(Path(folder) / "plan.safetensors")
        options = ("--plan", str(plan), "--enable-prompt-tokens-details", "--num-gpu-blocks-override", BLOCKS)
        with serving(Path(folder) / "log", MODEL, *options, cached=True, **ALLOCATOR) as server:
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end or len(sizes) < 3:
                for name, count in one_round(server, pool, rng, text).items():
                    totals[name] = totals.get(name, 0) + count
                sizes.append(memory(server.pid))
    third = len(sizes) // 3
    settled, last = max(sizes[third : 2 * third]), max(sizes[-third:])
    assert last <= settled + MORE_MEMORY, f"memory grew: {[size >> 20 for size in sizes]} MiB after each round"
    facts = {"minutes": minutes, "rounds": len(sizes), "requests": len(sizes) * A_ROUND, "errors": 0, "tokens": totals}
    return {**facts, "first_MiB": sizes[0] >> 20, "second_third_MiB": settled >> 20, "last_third_MiB": last >> 20}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--minutes", type=float, default=60)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    print(json.dumps(run(given.minutes, given.seed)))


if __name__ == "__main__":
    main()
