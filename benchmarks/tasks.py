"""lm-eval and EvalScope on local questions: their own model, ours at threshold 0 (the same to the last digit), ours at 50 %.

    python benchmarks/tasks.py lab-moe --text wiki103.valid.txt --data tasks --limit 400 --out benchmarks/results/tasks_lab.json

Needs `pip install 'ace-moe[eval]'`. One row for each harness and task; a later run adds the rows that are missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from running import made_here, parser, store

from ace_moe import build_plan
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.lab.tasks.tasks import TASKS, find_file, read_rows
from ace_moe.mapping import map_budgets
from ace_moe.policies import make
from ace_moe.scoring.statistics import mean_difference, mean_interval

NAMES = ("arc_easy", "piqa", "lambada")
SKIP = 0.5
Answers = tuple[list[float], Any]  # one number a question, and all the harness wrote down


def make_plan(options: argparse.Namespace, path: Path) -> None:
    """Tables, and the threshold for 50 % on a text that is none of the tasks."""
    model = load_model(options.model, "cpu")
    windows = load_windows(model, load_tokenizer(options.model), options.text, 1024, options.tokens)
    map_budgets(model, build_plan(options.model), make("ace"), windows, [SKIP], save=lambda plan: plan.save(path))


def of_lm_eval(options: argparse.Namespace, plan: Path) -> tuple[Any, Any, Callable[..., Answers]]:
    """(their model's harness, ours, how one of them is asked)."""
    from lm_eval.models.huggingface import HFLM

    from ace_moe.lab.harnesses.lm_eval import AceLM, LmEval

    where = {"device": "cpu", "batch_size": options.batch}
    stock, ours = HFLM(options.model, **where), AceLM(options.model, plan=str(plan), **where)

    def ask(harness: LmEval, name: str, rows: Any) -> Answers:
        found = harness.results(name, rows, None)
        samples = found["samples"][name]
        return [float(s["acc"]) for s in samples], [found["results"], [s["resps"] for s in samples]]

    return LmEval(stock), LmEval(ours), ask


def of_evalscope(options: argparse.Namespace, plan: Path) -> tuple[Any, Any, Callable[..., Answers]]:
    from evalscope.models.modelscope import ModelScopeAPI

    from ace_moe.lab.harnesses.evalscope import AceAPI, EvalScope

    where: dict[str, Any] = {"device_map": "cpu", "precision": "bfloat16"}
    stock, ours = ModelScopeAPI(options.model, **where), AceAPI(options.model, plan=str(plan), **where)

    def ask(harness: EvalScope, name: str, rows: Any) -> Answers:
        scores = [r["sample_score"]["score"] for r in harness.reviews(name, rows, None)]
        return [float(s["value"][s["main_score_name"]]) for s in scores], scores

    return EvalScope(stock, options.cap, options.batch), EvalScope(ours, options.cap, options.batch), ask


HARNESSES = {"lm-eval": (of_lm_eval, "lm_eval"), "evalscope": (of_evalscope, "evalscope")}


def measure(name: str, rows: list[Any], stock: Any, ours: Any, ask: Callable[..., Answers]) -> dict[str, Any]:
    start = time.perf_counter()
    theirs, their_record = ask(stock, name, rows)
    ours.set_skip(0.0)
    unskipped, our_record = ask(ours, name, rows)
    ours.set_skip(SKIP)
    skipped, _ = ask(ours, name, rows)
    change, interval = mean_difference(skipped, unskipped), mean_interval(skipped)
    return {
        **{"task": name, "questions": len(rows), "stock": sum(theirs) / len(theirs)},
        **{"at_0": sum(unskipped) / len(unskipped), "same_to_the_last_digit": their_record == our_record},
        **{"at_50": interval.value, "interval": [interval.low, interval.high], "realised": ours.realised},
        **{"change": [change.value, change.low, change.high], "seconds": round(time.perf_counter() - start, 1)},
    }


def run(harness: str, plan: Path, options: argparse.Namespace) -> None:
    """Every task through one harness; the file is written after each."""
    found = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    build, package = HARNESSES[harness]
    stock, ours, ask = build(options, plan)
    for name in NAMES:
        if any((row["harness"], row["task"]) == (harness, name) for row in found["rows"]):
            continue
        path = find_file(TASKS[name], options.data)
        assert path is not None
        rows = read_rows(TASKS[name], path)[: options.limit]
        row = {"harness": harness, "version": version(package), **measure(name, rows, stock, ours, ask)}
        print(row, flush=True)
        found = made_here(rows=[*found["rows"], row])
        store(options.out, found)


def main() -> None:
    made = parser(__doc__, must_store=True, tokens=16384, batch=8)
    made.add_argument("model")
    made.add_argument("--text", type=Path, required=True, help="text the threshold is mapped on")
    made.add_argument("--data", type=Path, required=True, help="folder with arc_easy.jsonl, piqa.jsonl, lambada.jsonl")
    made.add_argument("--limit", type=int, default=400, help="questions of each task")
    made.add_argument("--cap", type=int, default=8, help="generated tokens (EvalScope)")
    made.add_argument("--harness", nargs="+", choices=list(HARNESSES), default=list(HARNESSES))
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.safetensors"
        make_plan(options, plan)
        for harness in options.harness:
            run(harness, plan, options)


if __name__ == "__main__":
    main()
