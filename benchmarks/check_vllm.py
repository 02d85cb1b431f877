"""What vLLM's own runner counts, on the machine it runs on: tokens by phase exact, padding of captured batches left out.

    python benchmarks/check_vllm.py            # a tiny model; on a GPU vLLM runs its second runner with CUDA graphs
    python benchmarks/check_vllm.py --eager    # on a CPU

Requests of odd lengths make every decode step a padded one, a small token budget cuts prompts into chunks, the last of them
one token long. Then requests with budgets of their own, restored slots, thresholds that keep a budget, and a trace out of the
captured graphs. Every check prints a line; a failed one ends with exit code 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from running import engine_options, parser

from ace_moe.engines.traces.file import load_trace
from ace_moe.engines.vllm import engine_args
from ace_moe.engines.vllm.control import set_restore, set_skip
from ace_moe.lab.traffic.simulate import Simulation
from ace_moe.policies import make
from serving import SIZES, TINY, report, reset, set_threshold, start, write_model, write_plan

LENGTHS, NEW, CHUNK = (5, 33, 65, 17, 129, 48, 21, 9, 70), 12, 64
MANY, ROOM = LENGTHS[:3] * 49, 256  # 147 sequences run in the graph of 256, whose slots two kernels sort instead of one
SLOTS = TINY["num_experts_per_tok"] * TINY["num_hidden_layers"]


def generate(llm: Any, lengths: tuple[int, ...], extra: list[Any] | None = None, new: int = NEW) -> None:
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[10 + (i * 7 + j) % 900 for j in range(n)]) for i, n in enumerate(lengths)]
    common = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**common, extra_args=own) for own in extra or [None] * len(prompts)]
    llm.generate(prompts, params, use_tqdm=False)


def check(name: str, found: object, wanted: object) -> bool:
    met = found == wanted
    print(f"{'ok  ' if met else 'FAIL'} {name}: {found}{'' if met else f', not {wanted}'}", flush=True)
    return met


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
    alone = len(LENGTHS) * (NEW - 1) * TINY["num_hidden_layers"]
    done.append(check("kept decode slots", found["decode"]["kept"], alone))
    print("executors", found["executors"], "refused", found["refused"])
    return all(done)


def run_many(llm: Any) -> bool:
    """A step of more sequences than one program sorts the slots of."""
    done = []
    for tau, kept in ((0.0, SLOTS), (1.1, TINY["num_hidden_layers"])):
        reset(llm)
        set_threshold(llm, [0.0, tau])
        generate(llm, MANY)
        found, wanted = report(llm), {"prefill": sum(MANY), "decode": len(MANY) * (NEW - 1)}
        done.append(check(f"tokens by phase of {len(MANY)} requests", phases(found), wanted))
        done.append(check("kept decode slots", found["decode"]["kept"], wanted["decode"] * kept))
    return all(done)


def run_requests(llm: Any) -> bool:
    """Requests with three budgets in one padded batch: counted apart; one that means nothing is refused."""
    set_threshold(llm, 0.0)
    set_restore(llm, False)
    reset(llm)
    extra = [{"ace_skip": b} if b else None for b in (0.3, 0.6, None, 0.3, 0.6, None, 0.3, 0.6, None)]
    generate(llm, LENGTHS, extra)
    found = report(llm)
    wanted: Any = {"prefill": sum(LENGTHS), "decode": 9 * (NEW - 1)}
    done = [check("tokens by phase with budgets of requests", phases(found), wanted)]
    for name, kept in (("0.30", 8), ("0.60", 1)):  # thresholds under every share, and above every one
        own = found["requests"][name]["decode"]
        wanted = (3 * (NEW - 1) * SLOTS, 3 * (NEW - 1) * SLOTS * kept // 8)
        done.append(check(f"decode slots routed and kept at {name}", (own["routed"], own["kept"]), wanted))
    try:
        generate(llm, LENGTHS[:1], [{"ace_skip": "junk"}])
        done.append(check("a budget that means nothing is refused", "served", "refused"))
    except Exception as error:
        done.append(check("a budget that means nothing is refused", "fraction" in str(error), True))
    return all(done)


def run_restore(llm: Any) -> bool:
    """Slots come back, no expert is read that the rule would not read in the first layer, prompts get none back."""
    found = {}
    for on in (False, True):
        set_restore(llm, on)
        set_threshold(llm, [0.0, 0.14])
        reset(llm)
        generate(llm, LENGTHS)
        found[on] = report(llm)
    done = [check("restored without being asked", found[False]["decode"]["restored"], 0)]
    done.append(check("slots restored", found[True]["decode"]["restored"] > 0, True))
    done.append(check("of prompts", found[True]["prefill"]["restored"], 0))
    ran = {on: 1 - f["decode"]["realised"] for on, f in found.items()}
    reads = f"{found[False]['reads']} / {found[True]['reads']}"
    print(f"ran {ran[False]:.1%} of decode slots, restored {ran[True]:.1%}; reads {reads}")
    return all(done)


def run_tracking(llm: Any) -> bool:
    """τ moves inside the captured graphs until the rule skips what was asked for."""
    set_skip(llm, {"prefill": 0.0, "decode": 0.5})
    for _ in range(2):
        reset(llm)
        generate(llm, LENGTHS, new=300)
    found = report(llm)["decode"]["skipped"]
    print(f"tracked: {found:.2%} of 50 %, {report(llm)['threshold']}")
    return check("within a point of what was asked for", abs(found - 0.5) < 0.01, True)


def decided(llm: Any) -> list[bool]:
    done = [check("slots are restored by default", report(llm)["restore"], True)]
    set_restore(llm, False)
    return done + [part(llm) for part in (run, run_requests, run_restore)]


def run_trace(llm: Any, path: Path) -> bool:
    """Every token once, and the rule on what was traced skips what the engine skipped."""
    set_restore(llm, False)
    set_threshold(llm, 0.14)
    reset(llm)
    generate(llm, LENGTHS)
    found, trace = report(llm), load_trace(path)
    simulated = Simulation(trace, make("share")).ratio(0.14)
    wanted = [sum(LENGTHS), len(LENGTHS) * (NEW - 1)]
    done = [check("traced tokens by phase", [int((trace.phases == phase).sum()) for phase in (0, 1)], wanted)]
    done.append(check("traced requests", len(trace.requests.unique()), len(LENGTHS)))
    print(f"skipped {found['realised']:.3%}, simulated {simulated:.3%}")
    return all([*done, check("within 0.2 points", abs(found["realised"] - simulated) <= 0.002, True)])


def main() -> None:
    made = engine_options(parser(__doc__), memory=0.3, cache=0.25, length=512)
    parts = ["decided", "many", "tracking", "trace"]
    made.add_argument("--parts", nargs="+", default=parts, help="each with an engine of its own")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = write_plan(Path(folder) / "plan.safetensors", TINY, {0.3: 0.0, 0.5: 0.1, 0.6: 1.1})
        model, common = write_model(Path(folder) / "model", TINY), {"allow_other_weights": True, "policy": "share"}
        traced, done = Path(folder) / "a.trace", []
        if "decided" in options.parts:
            done += decided(start(model, options, chunk=CHUNK, **engine_args(plan, 0.0, **common)))
        if "many" in options.parts:
            own = engine_args(plan, 0.0, **common, restore=False)
            done.append(run_many(start(model, options, chunk=ROOM, sizes=[*SIZES, ROOM], **own)))
        if "tracking" in options.parts:
            done.append(run_tracking(start(model, options, **engine_args(plan, 0.5, **common, track=True))))
        if "trace" in options.parts:
            llm = start(model, options, **engine_args(plan, 0.0, **common, trace=str(traced)))
            done.append(run_trace(llm, traced))
        sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
