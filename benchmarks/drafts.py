"""What a budget for drafted tokens does: how many drafts are accepted, whose text comes out, how long a token takes. In vLLM.

    ace plan MODEL --text TEXT -o plan.safetensors
    python benchmarks/drafts.py MODEL --plan plan.safetensors --text TEXT --draft SMALLER -o drafts.json

Drafts come from the prompt (ngram) or from a smaller model with the same tokens; both are left as they are. Budgets are of the
first token of a step (`decode`) and of the drafts behind it (`verify`). `same`: the part of the text up to its first token that
the model without a plan would not have written, greedily. No slot is restored.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, or a CPU engine wants most of the memory

import torch
from running import made_here, parser, store

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.engines.vllm import engine_args
from ace_moe.engines.vllm.control import report, reset, set_skip

BUDGETS = [(0.0, 0.0), (0.3, 0.3), (0.3, 0.0), (0.0, 0.3), (0.6, 0.6), (0.6, 0.0), (0.0, 0.6)]  # decode, verify
PROMPT = 64  # tokens


def drafters(options: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found: dict[str, dict[str, Any] | None] = {"none": None, "ngram": lookup}
    if options.draft:
        found[options.draft.name] = {"method": "draft_model", "model": str(options.draft)}
    return {name: config and {**config, "num_speculative_tokens": options.drafts} for name, config in found.items()}


def engine(options: argparse.Namespace, drafter: dict[str, Any] | None) -> Any:
    from vllm import LLM

    drafted = {"speculative_config": drafter} if drafter else {}
    return LLM(
        options.model, dtype=options.dtype, max_model_len=512, enforce_eager=options.eager, enable_prefix_caching=False,
        seed=0, disable_log_stats=False, max_num_seqs=options.batch, **drafted,
        **({"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}),
        **engine_args(options.plan, 0.0, restore=False),
    )  # fmt: skip


def prompts(options: argparse.Namespace) -> list[list[int]]:
    ids = load_tokenizer(options.model)(options.text.read_text(encoding="utf-8"))["input_ids"]
    return [ids[at : at + PROMPT] for at in range(0, len(ids) - PROMPT, len(ids) // options.prompts)][: options.prompts]


def write(llm: Any, starts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """What is written, and milliseconds a token of one sequence."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in starts], params, use_tqdm=False)
    times = [(o.metrics.last_token_ts - o.metrics.first_token_ts) / (tokens - 1) for o in outs]
    return [list(o.outputs[0].token_ids) for o in outs], 1e3 * statistics.median(times)


def agreed(found: list[list[int]], expected: list[list[int]]) -> float:
    """The part of a text in front of its first other token, on average."""
    parts = []
    for text, own in zip(found, expected, strict=True):
        other = (at for at, (a, b) in enumerate(zip(text, own, strict=True)) if a != b)
        parts.append(next(other, len(own)) / len(own))
    return statistics.mean(parts)


def measure(llm: Any, budgets: tuple[float, float], starts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Of every step's tokens the first is decoded; what it brings beyond that one was drafted and accepted."""
    decode, verify = budgets
    set_skip(llm, {"prefill": 0.0, "decode": decode, "verify": verify})
    reset(llm)
    texts, ms = write(llm, starts, tokens)
    found = report(llm)
    slots = found["prefill"]["routed"] / sum(map(len, starts))  # of a token
    steps, drafted = (found.get(phase, {}).get("routed", 0) / slots for phase in ("decode", "verify"))
    accepted = len(starts) * (tokens - 1) - steps
    realised = {phase: found[phase]["realised"] for phase in ("decode", "verify") if found.get(phase, {}).get("routed")}
    return {
        "decode": decode, "verify": verify, "ms": ms, "steps": steps, "drafted": drafted, "accepted": accepted,
        "realised": realised, "texts": texts,
    }  # fmt: skip


def main() -> None:
    made = parser(__doc__, drafts=3, prompts=24, tokens=64, batch=8, dtype="float32", eager=False)
    made.add_argument("model")
    made.add_argument("--plan", type=Path, required=True)
    made.add_argument("--text", type=Path, required=True)
    made.add_argument("--draft", type=Path, help="a smaller model with the same tokens")
    options = made.parse_args()
    starts, rows = prompts(options), []
    expected: list[list[int]] = []
    for name, drafter in drafters(options).items():
        llm = engine(options, drafter)
        for budgets in BUDGETS if drafter else BUDGETS[:1] + [b for b in BUDGETS if b[0] == b[1] > 0]:
            row = {"drafter": name, **measure(llm, budgets, starts, options.tokens)}
            texts = row.pop("texts")
            expected = expected or texts  # the first is of nothing drafted and nothing skipped
            row["same"] = agreed(texts, expected)
            rate = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
            print(
                f"{name:>9} decode {budgets[0]:.0%} verify {budgets[1]:.0%}: {rate:.1%} of {row['drafted']:.0f} drafts accepted, "
                f"same {row['same']:.1%}, {row['ms']:.2f} ms, realised {row['realised']}",
                flush=True,
            )
            rows.append(row)
            store(options.out, made_here(tokens=options.tokens, prompts=len(starts), rows=rows))
        del llm
        gc.collect()


if __name__ == "__main__":
    main()
