"""Tasks at 30, 50 and 60 %: accuracy, and how often the answer stays the unskipped model's, for `auto` and `paper`.

    python benchmarks/answers.py MODEL … --text wiki103.valid.txt --data tasks [--tune] [--device cuda] -o answers.json

LAMBADA, PIQA, ARC-E and SciQ by likelihood, as lm-eval asks them zero-shot: of choices the likeliest, of LAMBADA the tokens that
are predicted in the last word's place. Thresholds come from `--text`, none of the tasks. `auto` is what `--tune` finds on it,
else the default. A row for each task, way and budget, written as it comes; rows that are there are not measured again, and
`runs` says by model which run measured it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from running import Row, parser
from torch import Tensor
from transformers import PreTrainedModel

from ace_moe import build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer
from ace_moe.files import hashes
from ace_moe.lab.compare.store import write_json
from ace_moe.lab.tasks.tasks import TASKS, Task, find_file, read_rows
from ace_moe.lab.tune import tune
from ace_moe.lab.tune.candidates import BASELINE, label
from ace_moe.mapping import TextSource, map_budgets
from ace_moe.mapping.passes import attached
from ace_moe.plan import Plan
from ace_moe.policies import PRESETS, Policy, TokenPolicy
from ace_moe.provenance import provenance
from ace_moe.scoring.statistics import mean_difference, mean_interval
from ace_moe.text import Text

NAMES = ("lambada", "piqa", "arc_easy", "sciq")
BUDGETS = (0.3, 0.5, 0.6)


# ---- questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One way to go on from a question: ids [L], of which the last `count` are the answer."""

    question: int
    ids: list[int]
    count: int


def asked(task: Task, rows: list[Any], tokenizer: Any) -> list[Asked]:
    found = []
    for number, row in enumerate(rows):
        prompt = task.ask(row)
        for answer in task.choices(row) if task.choices else [task.last_word(row)]:  # type: ignore[misc]
            head, whole = (tokenizer(text)["input_ids"] for text in (prompt, f"{prompt} {answer}"))
            found.append(Asked(number, whole, max(1, len(whole) - len(head))))
    return found


def batches(every: list[Asked], tokens: int) -> Iterator[list[int]]:
    """Places of ways of about one length, so many tokens at a time."""
    order = sorted(range(len(every)), key=lambda i: len(every[i].ids))
    while order:
        count = max(1, tokens // len(every[order[-1]].ids))
        yield order[-count:]
        del order[-count:]


@torch.inference_mode()
def read(model: PreTrainedModel, every: list[Asked], tokens: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """Log-likelihood of each answer, and what the model predicts in its place."""
    likely, said = [0.0] * len(every), [()] * len(every)  # type: tuple[list[float], list[tuple[int, ...]]]
    for places in batches(every, tokens):
        ids, mask = padded([every[i].ids for i in places])
        logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
        for row, place in zip(logits, places, strict=True):
            end, count = len(every[place].ids), every[place].count
            scores = row[end - count - 1 : end - 1].float().log_softmax(-1)
            target = torch.tensor(every[place].ids[end - count :], device=scores.device)
            likely[place] = float(scores.gather(1, target.unsqueeze(1)).sum())
            said[place] = tuple(scores.argmax(-1).tolist())
    return likely, said


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """ids and mask [B, L], padding behind: causal attention never looks at it."""
    ids, mask = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return ids, mask


def answers(task: Task, every: list[Asked], found: tuple[list[float], list[tuple[int, ...]]]) -> list[Any]:
    """The model's answer to each question: the number of a choice, or the tokens it would write."""
    likely, said = found
    if not task.choices:
        return list(said)
    by_question: dict[int, list[float]] = {}
    for one, value in zip(every, likely, strict=True):
        by_question.setdefault(one.question, []).append(value)
    return [values.index(max(values)) for values in by_question.values()]


def right(task: Task, rows: list[Any], every: list[Asked], given: list[Any]) -> list[float]:
    golds = [task.gold(r) for r in rows] if task.gold else [tuple(a.ids[-a.count :]) for a in every]
    return [float(answer == gold) for answer, gold in zip(given, golds, strict=True)]


# ---- a model ----------------------------------------------------------------------------------------------------------


def ways(
    model: PreTrainedModel, options: argparse.Namespace, source: Path
) -> dict[str, tuple[Plan, Policy, list[float]]]:
    """Plan, policy and thresholds of each way, found on the text."""
    windows = TextSource(source, Text.of(options.text), 1024, options.tokens).windows(model)
    auto: TokenPolicy = BASELINE
    plan = build_plan(model)
    if options.tune:
        tuned = tune(model, plan, windows, BUDGETS)
        plan, auto = tuned.searched, tuned.policy
    found: dict[str, tuple[Plan, Policy, list[float]]] = {}
    for name, policy in (("auto", auto), ("paper", PRESETS["paper"])):
        mapped = map_budgets(model, plan, policy, windows, BUDGETS, batch=4)
        found[name] = (mapped.plan, policy, [fit.threshold for fit in mapped.fits])
        print(source.name, name, label(policy), [f"{fit.threshold:.4f}" for fit in mapped.fits], flush=True)
    return found


def measure(
    model: PreTrainedModel, task: Task, rows: list[Any], every: list[Asked], made: Any, tokens: int
) -> Iterator[Row]:
    """The unskipped model first, through the same dispatch; the others are held against it."""
    whole: tuple[list[Any], list[float]] | None = None
    for way, (plan, policy, taus) in made.items():
        with attached(model, plan, policy) as deciders:
            for budget, tau in [*([] if whole else [(0.0, 0.0)]), *zip(BUDGETS, taus, strict=True)]:
                deciders.set(torch.full((3,), tau))
                deciders.reset()
                given = answers(task, every, read(model, every, tokens))
                correct = right(task, rows, every, given)
                whole = whole or (given, correct)
                same = [float(a == b) for a, b in zip(given, whole[0], strict=True)]
                yield {
                    **{"way": way if budget else "dense", "policy": label(policy), "budget": budget},
                    **{"realised": deciders.realised, "threshold": tau, "accuracy": asdict(mean_interval(correct))},
                    **{"change": asdict(mean_difference(correct, whole[1])), "agreement": asdict(mean_interval(same))},
                }  # fmt: skip


def made_by(options: argparse.Namespace) -> Row:
    files = [options.text, *(find_file(TASKS[name], options.data) for name in NAMES)]
    return provenance(options.device or "cpu", hashes(p for p in files if p))


def study(source: Path, options: argparse.Namespace, result: Row) -> None:
    todo = [name for name in NAMES if not any((r["model"], r["task"]) == (source.name, name) for r in result["rows"])]
    if not todo:
        return
    model, tokenizer = load_model(source, options.device), load_tokenizer(source)
    result["runs"].append({"model": source.name, **made_by(options)})
    made = ways(model, options, source)
    for name in todo:
        task = TASKS[name]
        rows = read_rows(task, find_file(task, options.data))[: options.limit]  # type: ignore[arg-type]
        every = asked(task, rows, tokenizer)
        chance = sum(1 / len(task.choices(r)) for r in rows) / len(rows) if task.choices else 0.0
        facts = {"model": source.name, "task": name, "questions": len(rows), "chance": chance}
        found = [{**facts, **row} for row in measure(model, task, rows, every, made, options.at_once)]
        result["rows"] += found
        write_json(options.out, result)
        for r in found:
            print(f"{source.name} {name} {r['way']} {r['budget']:.0%}: {r['accuracy']['value']:.4f} "
                  f"same {r['agreement']['value']:.4f} realised {r['realised']:.3f}", flush=True)  # fmt: skip


def main() -> None:
    made = parser(__doc__, must_store=True)
    made.add_argument("models", type=Path, nargs="+")
    made.add_argument("--text", type=Path, required=True, help="text the thresholds are found on")
    made.add_argument("--data", type=Path, required=True, help="folder with the tasks' .jsonl files")
    made.add_argument("--tune", action="store_true", help="auto is what a search on the text finds")
    made.add_argument("--tokens", type=int, default=16384, help="of the text")
    made.add_argument("--limit", type=int, help="questions of each task")
    made.add_argument("--at-once", type=int, default=8192, help="tokens of a pass")
    made.add_argument("--device")
    options = made.parse_args()
    empty: Row = {"kind": "answers", "rows": [], "runs": []}
    result: Row = json.loads(options.out.read_text()) if options.out.exists() else empty
    for source in options.models:
        study(source, options, result)


if __name__ == "__main__":
    main()
