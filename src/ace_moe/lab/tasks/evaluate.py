"""Tasks through a harness: every task at every budget, with intervals and paired differences to the unskipped model."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import progress
from ...ace import ACE
from ...checkpoint.model import called
from ...errors import ResultError
from ...provenance import provenance
from ...scoring.statistics import mean_difference, mean_interval
from ..store import EVAL, Results, ResultsFile, begin_run, put
from .catalogue import Row


class Harness(ABC):
    """lm-eval or EvalScope. `model` is the harness's own kind of model with our plan in it."""

    model: Any

    @property
    def ace(self) -> ACE:
        return self.model.ace

    def set_skip(self, skip: float) -> None:
        self.ace.set_skip(skip)
        self.ace.reset()

    @abstractmethod
    def ask(self, name: str, rows: Sequence[Row] | None, limit: int | None) -> tuple[str, list[float]]:
        """The metric's name and its value for each question; `rows` None takes the harness's own data."""

    @property
    def realised(self) -> float:
        return self.ace.realised


def evaluate(
    harness: Harness,
    tasks: Sequence[str],
    skips: Sequence[float],
    rows: Mapping[str, Sequence[Row] | None],
    limit: int | None,
    path: Path,
    identity: Results,
    facts: Results,
) -> Results:
    """Ask every task at every budget that is not in the file yet; each cell is written as soon as it is there."""
    file = ResultsFile(path, EVAL, identity)
    asked = {task: _questions(rows.get(task)) for task in tasks}
    with file.changed() as results:
        _check_questions(results, asked, path)
        number = begin_run(results, facts)
        results["questions"] = results.get("questions", {}) | asked
        finished = {(cell["task"], cell["skip"]) for cell in results.setdefault("cells", [])}
    with progress.task("tasks", len(skips) * len(tasks)) as bar:
        for skip in sorted(skips):  # the unskipped model first: the others are compared with it
            for task in tasks:
                if (task, skip) not in finished:
                    harness.set_skip(skip)
                    metric, questions = harness.ask(task, rows.get(task), limit)
                    mean = mean_interval(questions)
                    cell = {"task": task, "skip": skip, "metric": metric, "value": mean.value, "questions": questions}
                    cell |= {"interval": [mean.low, mean.high], "change": None}
                    with file.changed() as results:
                        put(results["cells"], cell | {"realised": harness.realised, "run": number}, ("task", "skip"))
                        _compare(results["cells"])
                bar.advance()
    return file.read()


def _questions(rows: Sequence[Row] | None) -> str:
    """The sha256 of the questions, or that they are the harness's own."""
    if rows is None:
        return "the harness's"
    return hashlib.sha256(json.dumps(list(map(dict, rows)), sort_keys=True).encode()).hexdigest()


def _check_questions(results: Results, asked: Mapping[str, str], path: Path) -> None:
    """Refuse other questions for a task that has cells; a file may be continued with other tasks."""
    for task, questions in asked.items():
        measured = any(cell["task"] == task for cell in results.get("cells", ()))
        if measured and results["questions"].get(task) != questions:
            raise ResultError(
                f"{path} holds another measurement: the questions of {task} are other ones. Choose another file with --out, or "
                "delete this one."
            )


def _compare(cells: list[Results]) -> None:
    """Compare every budget with the unskipped model, also where that was asked in a later run."""
    unskipped = {cell["task"]: cell["questions"] for cell in cells if cell["skip"] == 0}
    for cell in cells:
        if cell["skip"] and cell["change"] is None and cell["task"] in unskipped:
            cell["change"] = asdict(mean_difference(cell["questions"], unskipped[cell["task"]]))


def facts(model: str, device: object = "cpu", inputs: Mapping[str, str] | None = None) -> Results:
    """Collect what a reader of the results needs to know about the run."""
    record = provenance(device, inputs)
    versions = {"ace_moe": record["version"], **{n: record["libraries"].get(n) for n in ("torch", "transformers")}}
    about = {"model": {"name": called(model)}, "environment": versions, "command": record["command"]}
    return {**about, "provenance": record}


def describe(settings: Results, harness: str) -> str:
    return f"policy {settings['policy']}, gain {settings['gain']}, through {harness}"
