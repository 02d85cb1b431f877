"""The study behind docs/results.md: every method on one model, thresholds across workloads, and the page from what is stored.

    python benchmarks/study.py lab-moe --text wiki.test.raw --workloads wikipedia.jsonl books.jsonl code.jsonl docs.jsonl
    python benchmarks/study.py --write

Results go to benchmarks/results: `compare_<name>.json` (budgets corrected until they are met), `compare_<name>_findings.json`
(protocol `findings`: one quantile pass, nothing corrected, for fewer methods) and `thresholds_<name>.json`. They are whole
after every cell, and the same command goes on where it was stopped. Rows that the page shows first are measured first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from study_page import DOCUMENT, RESULTS, page

from ace_moe import build_plan, progress
from ace_moe.errors import AceError
from ace_moe.evaluate.calibration import calibration_windows
from ace_moe.evaluate.compare import compare
from ace_moe.evaluate.grid import Grid, parse_gains, parse_methods
from ace_moe.evaluate.subject import Subject, facts
from ace_moe.evaluate.thresholds import Study, study
from ace_moe.loading import load_model, load_tokenizer, load_windows
from ace_moe.policies import POLICIES, make

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
GAINS = "kept,power,none"
CORE = "ace,gsp,rcr,share,top_p,relative,score,aimer,ace:fusion=min,ace:fusion=mean,random,oracle,oracle:raw"
# methods that refill what they exclude skip no slots; these variants skip them, so that they can be held against a budget
SKIPPING = ("xshare", "oea", "expert_sparsity", "reap:prune", "aimer:prune", "diep")
VARIANTS = ",".join(["sere:group=1", "rcr:centred=false", *(f"{name}:refill=false" for name in SKIPPING)])
FIRST = {  # the rows a reader compares with first
    "kept": "ace,gsp,rcr,share,top_p,relative,score,aimer,ace:fusion=min,ace:fusion=mean,random",
    "none": "ace,gsp,share,top_p,oracle,oracle:raw",
    "power": "ace,share",
}


class TimeIsUpError(Exception):
    """The run has had its seconds; what is stored can be continued."""


class Clock:
    """Says what was finished and when; ends the run after `seconds`."""

    def __init__(self, seconds: float | None):
        self.start, self.seconds, self.cells = time.perf_counter(), seconds, 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    def began(self, task: progress.Task) -> None: ...

    def ended(self, task: progress.Task) -> None: ...

    def moved(self, task: progress.Task) -> None:
        """Told of every part of the work; a cell that ends after the time is the last."""
        if task.label != "cells":
            return
        self.cells += 1
        if self.seconds is not None and self.now > self.seconds:
            raise TimeIsUpError

    def say(self, text: str) -> None:
        print(f"{self.now:7.1f} s  {text}", flush=True)


def grids(options: argparse.Namespace, correct: bool) -> Iterator[Grid]:
    """What is measured, in order: the first rows, all core rows, then every other method by itself."""

    def grid(methods: str, gains: str) -> Grid:
        return Grid(parse_methods(methods), BUDGETS, parse_gains(gains), {}, correct)

    if options.methods:
        for method in parse_methods(options.methods):
            yield grid(method, options.gains)
        return
    for gain, methods in FIRST.items():
        yield grid(methods, gain)
    yield grid(CORE, options.gains)
    if correct:
        others = [name for name in POLICIES if name not in CORE.split(",")]
        for method in (*others, *VARIANTS.split(",")):
            yield grid(method, options.gains)


def comparison(subject: Subject, options: argparse.Namespace, correct: bool, clock: Clock) -> None:
    """A method that breaks is named and left out; the others go on."""
    path = options.out / f"compare_{options.name}{'' if correct else '_findings'}.json"
    about = facts(subject, options.name) | {"command": command(options)}
    for grid in grids(options, correct):
        label = (
            f"{path.stem}: {' '.join(grid.methods[:3])}{' …' if len(grid.methods) > 3 else ''} {','.join(grid.gains)}"
        )
        try:
            with progress.shown(clock):
                found = compare(subject, grid, path, about)
        except (AceError, RuntimeError) as error:
            clock.say(f"{label}: {type(error).__name__}: {str(error)[:200]}")
            continue
        clock.say(f"{label}: {len(found['cells'])} cells")


def stability(load: Callable[[Path], Subject], options: argparse.Namespace, clock: Clock) -> None:
    workloads = [load(path) for path in options.workloads]
    setup = Study(workloads[0], make("ace"), BUDGETS)
    about = facts(workloads[0], options.name) | {"command": command(options)}
    found = study(setup, [w.windows for w in workloads], options.out / f"thresholds_{options.name}.json", about)
    clock.say(f"thresholds: {len(found['transfers'])} transfers")


def command(options: argparse.Namespace) -> str:
    """As a reader would type it: files by their names."""
    parts = ["python benchmarks/study.py", Path(options.model).name, "--text", options.text.name]
    parts += ["--workloads", *(p.name for p in options.workloads)] if options.workloads else []
    parts += [f"--{name} {getattr(options, name)}" for name in ("tokens", "window", "batch", "device")]
    return " ".join(map(str, parts))


def measure(options: argparse.Namespace) -> None:
    clock = Clock(options.seconds)
    options.name = options.name or Path(options.model).name.removesuffix("-moe")
    model, tokenizer = load_model(options.model, options.device), load_tokenizer(options.model)
    plan = build_plan(options.model)

    def load(text: Path, tokens: int) -> Subject:
        windows = load_windows(model, tokenizer, text, options.window, tokens)
        learned, _ = calibration_windows(model, tokenizer, text, windows, options.calibration)
        return Subject(model, plan, windows, options.batch, learned)

    subject = load(options.text, options.tokens)
    clock.say(f"{options.name} on {options.device}, {tuple(subject.windows.ids.shape)} tokens, {model.dtype}")
    try:
        if "findings" in options.protocol:
            comparison(subject, options, False, clock)
        if options.workloads:
            stability(lambda path: load(path, options.workload_tokens), options, clock)
        if "corrected" in options.protocol:
            comparison(subject, options, True, clock)
    except TimeIsUpError:
        clock.say("time is up; the same command goes on from here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--text", type=Path, help="measured text")
    parser.add_argument(
        "--workloads", type=Path, nargs="+", default=[], help="texts between which thresholds are carried"
    )
    parser.add_argument("--calibration", type=Path, help="text for methods that need one; default: what follows")
    parser.add_argument("--protocol", nargs="+", choices=["findings", "corrected"], default=["findings", "corrected"])
    parser.add_argument("--methods", help="only these; default: all")
    parser.add_argument("--gains", default=GAINS)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--workload-tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="stop after this time; the same command goes on later")
    parser.add_argument("--name", help="of the stored files; default: the model's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="write docs/results.md from what is stored")
    options = parser.parse_args()
    if options.model:
        if options.text is None:
            parser.error("--text is needed to measure")
        measure(options)
    if options.write:
        DOCUMENT.write_text(page(RESULTS), encoding="utf-8")
        print(DOCUMENT)


if __name__ == "__main__":
    main()
