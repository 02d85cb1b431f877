"""docs/budgets.md from the stored results; nothing in its tables is typed by hand.

python benchmarks/budgets_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "budgets.md"

HEAD = """# Budgets that keep themselves

A budget is the fraction of routed slots to skip. This page is about what happens between the number you ask for and what
runs: slots that cost nothing, thresholds that follow the traffic, budgets of single requests, and budgets under load. Tables
are written by `python benchmarks/budgets_page.py` from `benchmarks/results/`.

## Slots that are free: restore

In a decode step the cost is the set of experts that are *read*, not the slots that run. Once the rule has decided every token,
a skipped slot whose expert another token of the step keeps is read anyway, so it runs after all:

    ace serve MODEL --skip 0.6                     # on by default for generated tokens; --no-restore leaves it out
    ACE.load("plan.safetensors", skip=0.6, restore=True)          # in Python you ask for it

- No expert is read that the rule alone would not read; a token runs at least what it would run alone; one sequence by itself
  is decided as without.
- What a token runs then depends on the others in its step. That is the price: without restore every token is decided by
  itself, whoever else is served. Under `VLLM_BATCH_INVARIANT=1` restore is off, and asking for it is refused.
- Generated tokens and drafts get slots back. Prompt tokens do not (a prompt reads nearly every expert, so restoring would undo
  its budget), but they vote; padding does not. With experts or sequences spread over ranks the vote is among a rank's tokens.
- A report has three numbers: `skipped` by the rule, `realised` not run, and `reads`, experts read of experts the router
  asked for. `reads=True` counts them without restoring. Metrics: `ace:slots_restored`, `ace:experts_read`, `ace:experts_asked`.
- `ace.set_restore(False)`, `POST /ace {"restore": false}` switch it while it runs.

"""
QUALITY = """What it is worth: decode batches of {batch} different sequences, {skip} of the slots skipped by the rule, KL
against the unskipped model, the same threshold with and without (small models; CPU, teacher-forced, 95 % over sequences).

"""
SPEED = """
What it costs: a recorded decode step of Qwen3-30B-A3B shapes (48 layers, bf16, random weights, one {device}), the same
threshold with and without, timed in turn. `own 0 %` is the plain rule with nothing skipped. Skewed routing is made so that 16
tokens read about 49 of 128 experts, an assumption ([speed](speed.md#routing)); uniform routing reads 82.

"""
TAIL = """
Large budgets become usable where batches are large: most slots of a batch of 64 come back, and the time follows the experts
that are read. At batch 4 a restored slot is a product of its own in our kernel for few tokens, so it is not quite free there.

## Thresholds that follow the traffic: track

A mapped threshold is exact on the text it was mapped on; on other text the ratio drifts by a few points. With tracking, each
row's threshold moves after every step by what the rule skipped too little, on the device and inside CUDA graphs:

    log τ += η · (asked − skipped in this step),   η = 0.2 · min(1, √tokens / 2)

    ace serve MODEL --skip 0.5 --track
    ace = ACE(plan, skip=0.5, control="track");  …;  ace.freeze()        # freeze: thresholds stay where they are

No text and no pass are needed: it starts from the plan's threshold if there is one, else from budget / k. `skipped` is the
rule's ratio, before slots are restored. A token's neighbours in time then matter a little; `freeze()` ends that. Ranks that see
the same tokens move alike to the last bit; with sequence parallelism it is refused; pipeline stages and data-parallel ranks
keep the budget each on its own layers or requests. Moving the thresholds of 48 layers takes {track_us} µs a step (one {device}).

"""
END = """
## A budget for each request

    client.completions.create(..., extra_body={"vllm_xargs": {"ace_skip": 0.3}})          # OpenAI API
    SamplingParams(extra_args={"ace_skip": 0.3})                                          # offline
    with ace.rows([0.3, 0.6, 0.0]): model.generate(batch)                                 # transformers: one a sequence

`ace_skip_prefill` and `ace_skip_decode` name both phases instead. Budgets are rounded to hundredths; a server has room for 15
different ones (divided among its API servers), more are refused with a 400, as are values that mean nothing and budgets the
plan has no threshold for. `report()["requests"]` and `GET /ace` show what each budget got.

Keys and values of a prompt depend on what was skipped, and vLLM caches them. So a request's budget goes into its prefix-cache
salt beside the user's own, and a `POST /ace` that changes the server's budget starts a new epoch: nothing that was cached
under another budget is read.

## Under load

    ace serve MODEL --skip 0.3 --skip-max 0.7 --target-tpot 25

raises the budget in steps of 5 points while the middle of 32 steps takes longer than 25 ms, up to 70 %, and lowers it again
below 85 % of that: graceful degradation instead of queues. The engine core decides and gives it to all ranks between two steps.
While it moves, cached prompts are of any budget between the two bounds. Off unless asked for.

{valve}

## Budgets in other words

    ace budget MODEL --plan P --text T --max-kl 0.05                  # the most that can be skipped within this KL (nats a token)
    ace budget MODEL --plan P --text T --reads 0.5 --sequences 16     # what must be skipped to read half of the experts

Both find a budget in hundredths on your text and map it like any other. Steps for `--reads` are drawn from the text's own
routing, one pass over it.

## What was run where

| | transformers on an H200 | vLLM on a CPU (its first runner) | vLLM on a GPU (its second runner) |
|---|---|---|---|
| restored slots | kernels checked against `rule.py`, timed above | run | run, counts checked |
| thresholds that move | kernel checked and timed | run | run in captured graphs |
| budgets of requests | – | run, 200 at once | run, three budgets in a padded batch, counts exact |
| budgets under load | – | loop tested alone | run, above |

## No text at all

`ACE.from_pretrained(MODEL, skip=0.5)`, `ace budget MODEL --plan P` and `ace serve MODEL --skip 0.5` without a text map the budget
on what the model writes itself: 8 samples of 256 tokens at temperature 1, seeded, kept in the plan as its workload. A text of
your own is the exact way and becomes the plan's default once it is given.
"""


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def quality(rows: list[dict[str, Any]]) -> str:
    lines = ["| model, text | KL | restored | ratio | slots run | experts read |", "|---|---|---|---|---|---|"]
    for r in rows:
        plain, restored, (low, high) = r["plain"], r["restored"], r["kl_ratio_95"]
        lines.append(
            f"| {r['model']}, {Path(r['text']).stem} | {plain['kl']:.4f} | {restored['kl']:.4f} | {r['kl_ratio']:.2f} "
            f"({low:.2f}–{high:.2f}) | {1 - restored['realised']:.0%} | {restored['reads']['ratio']:.2f} |".replace(
                "%", " %"
            )
        )
    return "\n".join(lines) + "\n"


def speed(rows: list[dict[str, Any]]) -> str:
    lines = ["| routing, batch | skipped | TPOT | restored | change | × own 0 % | slots run | experts read |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    base = {(r["routing"], r["batch"]): r["ms"]["plain"] for r in rows if r["skip"] == 0}
    for r in rows:
        plain, restored, facts = r["ms"]["plain"], r["ms"]["restored"], r["facts"]["restored"]
        faster = base[r["routing"], r["batch"]] / restored
        cells = [f"{r['routing']}, {r['batch']}", f"{r['skip']:.0%}", f"{plain:.2f} ms", f"{restored:.2f} ms"]
        cells += [
            f"{restored / plain - 1:+.1%}",
            f"{faster:.2f}",
            f"{facts['ran']:.0%}",
            f"{facts['reads'] / facts['asked']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return "\n".join(lines) + "\n"


def tracked(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | asked | mean | worst over any 20,000 tokens behind the first 4,000 |", "|---|---|---|---|"]
    for r in rows:
        mean = f"{r['mean']:.2%}".replace("%", " %")
        lines.append(
            f"| {r['model']} | {r['asked']:.0%} | {mean} | {r['worst_points']:.2f} points |".replace("0%", "0 %")
        )
    return "\n".join(lines) + "\n"


def valve() -> str:
    """Few, many and few requests again, in words."""
    found = load("valve_h200.json")
    fixed, rows = found["fixed_ms"], found["rows"]
    few, many = sorted({int(name.split()[0]) for name in fixed})
    held = [row for row in rows if row["phase"] == "many"]
    settled = held[len(held) // 2 :]
    worst = max(abs(row["ms"] / found["target_ms"] - 1) for row in settled)
    after = [row["budget"] for row in rows if row["phase"] == "few again"][-1]
    percent = "{:.0%}".format
    text = (
        f"Tried in vLLM on one {found['device']} (24 layers of Qwen3-30B-A3B's shape, random weights, bounds 30 and 70 %): "
        f"{few} requests at 30 % take {fixed[f'{few} at 30%']:.2f} ms a step, {many} take {fixed[f'{many} at 30%']:.2f}. With a "
        f"target of {found['target_ms']:.2f} ms and {many - few} more requests arriving, the budget rose to "
        f"{percent(held[-1]['budget'])}, and in the second half of that time steps were within {percent(worst)} of the target; "
        f"when they had left, it fell back to {percent(after)}, where steps are as slow as it lets them be. All "
        f"{found['finished']} of {found['sent']} requests were answered."
    )
    return fill(text.replace("%", " %").replace("  %", " %"), 128)


def page() -> str:
    restore, kept = load("restore_h200.json"), load("restore_quality.json")["rows"]
    head = QUALITY.replace("{batch}", str(kept[0]["batch"])).replace(
        "{skip}", f"{kept[0]['skip']:.0%}".replace("%", " %")
    )
    tail = TAIL.replace("{track_us}", str(restore["moving_thresholds_us"])).replace("{device}", restore["device"])
    streams = load("tracking.json")["rows"]
    told = (
        f"Teacher-forced decoding of {streams[0]['batch']} sequences a step over Wikipedia, code, books and documentation one "
        f"after the other, {streams[0]['tokens']:,} tokens, policy `{streams[0]['policy']}`, no pass before:\n\n"
    )
    parts = [HEAD, head, quality(kept), SPEED.replace("{device}", restore["device"]), speed(restore["rows"]), tail]
    return "".join([*parts, told, tracked(streams), END.replace("{valve}", valve())])


if __name__ == "__main__":
    PAGE.write_text(page())
