"""What vLLM's own runner counts, on the machine it runs on: tokens by phase exact, padding of captured batches left out.

    python benchmarks/check_vllm.py            # a tiny model; on a GPU vLLM runs its second runner with CUDA graphs
    python benchmarks/check_vllm.py --eager    # on a CPU

Requests of odd lengths make every decode step a padded one, a small token budget cuts prompts into chunks, the last of them
one token long. Every check prints a line; a failed one ends with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from ace_moe.integrations.vllm import engine_args
from serving import TINY, report, reset, set_threshold, start, write_model, write_plan

LENGTHS, NEW, CHUNK = (5, 33, 65, 17, 129, 48, 21, 9, 70), 12, 64
SLOTS = TINY["num_experts_per_tok"] * TINY["num_hidden_layers"]


def generate(llm: Any, lengths: tuple[int, ...]) -> None:
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[10 + (i * 7 + j) % 900 for j in range(n)]) for i, n in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)


def check(name: str, found: object, wanted: object) -> bool:
    print(
        f"{'ok  ' if found == wanted else 'FAIL'} {name}: {found}{'' if found == wanted else f', not {wanted}'}",
        flush=True,
    )
    return found == wanted


def phases(found: dict[str, Any]) -> dict[str, int]:
    return {phase: found[phase]["routed"] // SLOTS for phase in ("prefill", "decode")}


def run(llm: Any) -> bool:
    done = [check("nothing is counted before the first request", report(llm)["prefill"]["routed"], 0)]
    for lengths in (LENGTHS, LENGTHS[:1], LENGTHS[:3]):
        reset(llm)
        set_threshold(llm, 0.0)
        generate(llm, lengths)
        wanted = {"prefill": sum(lengths), "decode": len(lengths) * (NEW - 1)}
        done.append(check(f"tokens by phase of {len(lengths)} requests", phases(report(llm)), wanted))
        done.append(check("nothing skipped at threshold 0", report(llm)["realised"], 0.0))
    reset(llm)
    set_threshold(llm, [0.0, 1.1])  # decode keeps the top slot alone
    generate(llm, LENGTHS)
    found = report(llm)
    done.append(check("prompts are whole under a budget for decode alone", found["prefill"]["realised"], 0.0))
    done.append(
        check("kept decode slots", found["decode"]["kept"], len(LENGTHS) * (NEW - 1) * TINY["num_hidden_layers"])
    )
    print("executors", found["executors"], "refused", found["refused"])
    return all(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--cache", type=float, default=0.25)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, plan = write_model(Path(folder) / "model", TINY), write_plan(Path(folder) / "plan.safetensors", TINY)
        llm = start(model, options, chunk=CHUNK, **engine_args(plan, 0.0, allow_other_weights=True))
        sys.exit(0 if run(llm) else 1)


if __name__ == "__main__":
    main()
