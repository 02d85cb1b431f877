"""Tasks: the fields of a question in a file, how it is asked and judged, and the paper's settings.

Each task has rows of its own shape in a local .jsonl file; without a file the harness fetches its own copy from the hub.
The paper's settings: zero-shot, greedy, at most 1,024 generated tokens for ARC and PIQA and 2,048 for the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import OptionError, TaskError, brief
from ...files import expand
from .answers import boxed, last_number, program, same_answer
from .sandbox import passes

SHORT, LONG = 1024, 2048  # generated tokens, as in the paper
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TaskSpec:
    """`ask` makes the prompt of a row. A choice is scored by likelihood, a text by `right(row, text)`."""

    name: str
    fields: tuple[str, ...]
    ask: Callable[[Row], str]
    choices: Callable[[Row], list[str]] | None = None
    gold: Callable[[Row], int] | None = None
    last_word: Callable[[Row], str] | None = None
    right: Callable[[Row, str], bool] | None = None
    stop: tuple[str, ...] = ()
    cap: int = LONG
    runs_code: bool = False
    # its name in each harness; `dataset`: rows like ours on the hub
    hub: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        return "acc" if self.right is None else "exact_match"


def _question(row: Row) -> str:
    query = row["query"]
    return f"{query if query.startswith('Question:') else f'Question: {query}'}\nAnswer:"


def _multiple_choice(name: str, cap: int = SHORT, **hub: str) -> TaskSpec:
    answers: dict[str, Any] = {"choices": lambda row: list(row["choices"]), "gold": lambda row: int(row["gold"])}
    return TaskSpec(name, ("query", "choices", "gold"), _question, **answers, cap=cap, hub=hub)


CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
EVERY = (
    _multiple_choice("arc_challenge", lm_eval="arc_challenge", evalscope="arc:ARC-Challenge"),
    _multiple_choice("arc_easy", lm_eval="arc_easy", evalscope="arc:ARC-Easy"),
    _multiple_choice("gpqa_diamond", LONG, lm_eval="gpqa_diamond_zeroshot", evalscope="gpqa_diamond"),
    TaskSpec(
        "piqa",
        ("goal", "sol1", "sol2", "label"),
        lambda row: f"Question: {row['goal']}\nAnswer:",
        choices=lambda row: [row["sol1"], row["sol2"]],
        gold=lambda row: int(row["label"]),
        cap=SHORT,
        hub={"lm_eval": "piqa", "evalscope": "piqa"},
    ),
    TaskSpec(
        "sciq",
        ("question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"),
        lambda row: f"{row['support']}\nQuestion: {row['question']}\nAnswer:".lstrip(),
        choices=lambda row: [*(row[f"distractor{n}"] for n in (1, 2, 3)), row["correct_answer"]],
        gold=lambda row: 3,
        cap=SHORT,
        hub={"lm_eval": "sciq", "evalscope": "sciq"},
    ),
    TaskSpec(
        "lambada",
        ("text",),
        lambda row: row["text"].rpartition(" ")[0],
        last_word=lambda row: row["text"].rpartition(" ")[2],
        cap=SHORT,
        hub={"lm_eval": "lambada_openai"},
    ),
    TaskSpec(
        "gsm8k",
        ("question", "answer"),
        lambda row: f"Question: {row['question']}\nAnswer:",
        right=lambda row, text: same_answer(last_number(text), last_number(row["answer"])),
        stop=("Question:",),
        hub={"lm_eval": "gsm8k", "evalscope": "gsm8k"},
    ),
    TaskSpec(
        "math_500",
        ("problem", "answer"),
        lambda row: f"Problem: {row['problem']}\nPut the final answer into \\boxed{{}}.\nSolution:",
        right=lambda row, text: same_answer(boxed(text), str(row["answer"])),
        stop=("Problem:",),
        hub={"lm_eval": "hendrycks_math500", "evalscope": "math_500"},
    ),
    TaskSpec(
        "humaneval",
        ("prompt", "test", "entry_point"),
        lambda row: row["prompt"],
        right=lambda row, text: passes(program(row["prompt"], text, row["test"], row["entry_point"])),
        stop=CODE_STOPS,
        runs_code=True,
        hub={"dataset": "openai/openai_humaneval", "evalscope": "humaneval"},
    ),
    TaskSpec(
        "live_code_bench",
        (),
        lambda row: "",
        right=lambda row, text: False,
        runs_code=True,
        hub={"evalscope": "live_code_bench"},
    ),
)
TASKS = {task.name: task for task in EVERY}
PAPER = ("arc_challenge", "arc_easy", "piqa", "math_500", "gpqa_diamond", "humaneval", "live_code_bench")
FILES = {"gsm8k": ("gsm8k_test", "gsm8k"), "lambada": ("lambada_test", "lambada"), "math_500": ("math500", "math_500")}


def parse_tasks(text: str) -> tuple[str, ...]:
    """ "paper", or names; a name that is not ours is a task of the harness."""
    named = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not named:
        raise OptionError(f"No task was named. Choose paper, or some of: {', '.join(TASKS)}, or any task of lm-eval.")
    return tuple(dict.fromkeys(name for part in named for name in (PAPER if part == "paper" else (part,))))


def check_source(task: TaskSpec, harness: str, local: bool) -> None:
    """Refuse a task that this harness cannot ask, before a model is loaded."""
    names = {"lm-eval": ("lm_eval", "dataset"), "evalscope": ("evalscope",)}[harness]
    if not local and not any(name in task.hub for name in names):
        other = "evalscope" if harness == "lm-eval" else "lm-eval"
        raise OptionError(
            f"{harness} has no task {task.name}. Give its questions with --data, use --harness {other}, or leave it out."
        )


def find_file(task: TaskSpec, folder: Path | None) -> Path | None:
    """Find the task's file in a folder of local data; None without a folder."""
    if folder is None:
        return None
    names = FILES.get(task.name, (task.name,))
    found = [path for name in names if (path := expand(folder) / f"{name}.jsonl").is_file()]
    if not found:
        raise TaskError(
            f"There is no {names[0]}.jsonl in {folder}. Put it there, or leave --data out to use the hub's."
        )
    return found[0]


def read_rows(task: TaskSpec, path: Path) -> list[Row]:
    """Read the questions of a local file, each checked for the fields the task reads."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: each line must be a JSON object ({brief(error)}). Fix the file.") from error
    for number, row in enumerate(rows, start=1):
        missing = [name for name in task.fields if not isinstance(row, dict) or name not in row]
        if missing:
            raise TaskError(
                f"{path}, line {number}: no field {missing[0]!r}. A question of {task.name} has: {', '.join(task.fields)}."
            )
        _check_row(task, row, f"{path}, line {number}")
    if not rows:
        raise TaskError(f"{path} has no question. Put at least one JSON object into it.")
    return rows


def _check_row(task: TaskSpec, row: Row, where: str) -> None:
    """Ask and judge a question once, now: a harness would find a fault after the model is loaded."""
    try:
        words = [task.last_word(row)] if task.last_word else []
        texts = [task.ask(row), *(task.choices(row) if task.choices else words)]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is missing")
        if task.choices and task.gold and not 0 <= task.gold(row) < len(texts) - 1:
            raise ValueError(f"answer {task.gold(row)} of {len(texts) - 1} choices")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise TaskError(
            f"{where}: this is not a question of {task.name} ({type(error).__name__}: {brief(error)}). Fix the file."
        ) from error
