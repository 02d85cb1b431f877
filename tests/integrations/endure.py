"""Threads that attach, generate and detach on a few models: python tests/integrations/endure.py --threads 8 --rounds 500

A model that another thread has is refused by name and left alone, and the round tried on another. In the end every model
is as it was, every text under a budget was the one that budget gives alone, and every count exact.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from ace_moe import ACE, build_plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.errors import IntegrationError

TAUS, PROMPT, NEW, SLOTS = (0.0, 0.1, 0.15), 5, 3, 6 * 8  # layers × k


def text(model: Any) -> list[int]:
    ids = torch.arange(5, 5 + PROMPT)[None]
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
    )
    return made[0].tolist()


def alone(model: Any, plan: Any, tau: float) -> list[int]:
    ace = ACE(plan)
    with ace(model):
        ace.set_threshold(tau)
        return text(model)


def run(threads: int, rounds: int, models: int = 6) -> dict[str, Any]:
    torch.set_num_threads(1)
    plan, made = build_plan(MODEL), [load_model(MODEL, "cpu", "float32") for _ in range(models)]
    expected, before = {tau: alone(made[0], plan, tau) for tau in TAUS}, [n for n, _ in made[0].named_modules()]
    refused, lock, start = 0, threading.Lock(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work(number: int) -> None:
        nonlocal refused
        rng, done = random.Random(number), 0
        while done < rounds:
            model, tau, ace = rng.choice(made), rng.choice(TAUS), ACE(plan)
            try:
                with ace(model):
                    ace.set_threshold(tau)
                    ace.reset()
                    assert text(model) == expected[tau]
                report = ace.report()
                assert report["prefill"]["routed"] == PROMPT * SLOTS and report["decode"]["routed"] == (NEW - 1) * SLOTS
                done += 1
            except IntegrationError as error:
                if "already has a plan attached" not in str(error):
                    raise
                with lock:
                    refused += 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    for model in made:
        assert [n for n, _ in model.named_modules()] == before and text(model) == expected[0.0]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    return {"threads": threads, "rounds": rounds, "refused (in use)": refused, "grown_MiB": grown >> 10}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--threads", type=int, default=8)
    asked.add_argument("--rounds", type=int, default=500)
    given = asked.parse_args()
    print(run(given.threads, given.rounds))


if __name__ == "__main__":
    sys.exit(main())
