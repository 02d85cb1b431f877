"""Questions from files, answers in texts, generated code under limits, and a run over a harness that is made up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ace_moe.errors import OptionError, ResultError, TaskError
from ace_moe.lab.tasks.answers import as_number, boxed, last_number, program, same_answer
from ace_moe.lab.tasks.catalogue import PAPER, TASKS, check_source, find_file, parse_tasks, read_rows
from ace_moe.lab.tasks.evaluate import evaluate
from ace_moe.lab.tasks.sandbox import Limits, check_allowed, passes
from command import run_ace

ROWS: dict[str, dict[str, Any]] = {
    "arc_easy": {"query": "Question: Which is wet?", "choices": ["fire", "water"], "gold": 1},
    "piqa": {"goal": "open a door", "sol1": "push it", "sol2": "eat it", "label": 0},
    "sciq": {
        **{"question": "Who?", "distractor1": "a", "distractor2": "b", "distractor3": "c"},
        **{"correct_answer": "d", "support": ""},
    },
    "lambada": {"text": "He gave it back to her, so she had it again"},
    "gsm8k": {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    "math_500": {"problem": "Halve one.", "answer": "\\frac{1}{2}"},
    "humaneval": {
        "prompt": "def add(a, b):\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    },
}


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_every_local_task_asks_and_judges() -> None:
    """Prompts carry the question and not the answer; the right answer is right and another is not."""
    ask = {name: TASKS[name].ask(row) for name, row in ROWS.items()}
    assert ask["arc_easy"] == "Question: Which is wet?\nAnswer:"
    assert ask["piqa"] == "Question: open a door\nAnswer:"
    assert ask["sciq"] == "Question: Who?\nAnswer:"
    assert ask["lambada"] == "He gave it back to her, so she had it"
    assert TASKS["lambada"].last_word(ROWS["lambada"]) == "again"  # type: ignore[misc]
    for name in ("arc_easy", "piqa", "sciq"):
        task, row = TASKS[name], ROWS[name]
        assert task.choices(row)[task.gold(row)] == {"arc_easy": "water", "piqa": "push it", "sciq": "d"}[name]  # type: ignore[misc]
    for name, right, wrong in (
        ("gsm8k", "That makes 1,000 − 995, so 5.", "It is 6."),
        ("math_500", "So \\boxed{\\dfrac12}.", "So \\boxed{2}."),
        ("humaneval", "    return a + b\n", "    return a - b\n"),
    ):
        judge = TASKS[name].right
        assert judge is not None
        assert judge(ROWS[name], right) and not judge(ROWS[name], wrong)


def test_the_papers_settings() -> None:
    """Seven tasks; 1,024 tokens for ARC and PIQA, 2,048 for the others; EvalScope has all of them."""
    assert parse_tasks("paper") == PAPER
    assert {TASKS[name].cap for name in ("arc_challenge", "arc_easy", "piqa")} == {1024}
    assert {TASKS[name].cap for name in PAPER[3:]} == {2048}
    assert all("evalscope" in TASKS[name].hub for name in PAPER)
    assert parse_tasks("piqa, mmlu,piqa") == ("piqa", "mmlu")
    with pytest.raises(OptionError, match="No task was named"):
        parse_tasks(" , ")


def test_what_a_harness_lacks_is_said_at_once(tmp_path: Path) -> None:
    """LAMBADA is lm-eval's, LiveCodeBench EvalScope's; with a file both take either."""
    for name, harness, other in (("lambada", "evalscope", "lm-eval"), ("live_code_bench", "lm-eval", "evalscope")):
        check_source(TASKS[name], harness, local=True)
        check_source(TASKS[name], other, local=False)
        options = ("--tasks", name, "--harness", harness, "--run-code", "-o", tmp_path / "eval.json")
        ran = run_ace("eval", "model", "-p", "plan.safetensors", *options)
        assert ran.code == 1 and f"--harness {other}" in ran.err.replace("\n", " ")
    ran = run_ace("eval", "model", "-p", "plan.safetensors", "--tasks", "piqa", "--harness", "other")
    assert ran.code == 1 and "lm-eval, evalscope" in ran.err


def test_local_files(tmp_path: Path) -> None:
    """Found by name, read line by line, checked before anything long starts."""
    task = TASKS["piqa"]
    assert find_file(task, None) is None
    with pytest.raises(TaskError, match=r"no piqa\.jsonl"):
        find_file(task, tmp_path)
    path = tmp_path / "piqa.jsonl"
    path.write_text(json.dumps(ROWS["piqa"]) + "\n\n", encoding="utf-8")
    assert find_file(task, tmp_path) == path
    assert read_rows(task, path) == [ROWS["piqa"]]
    for content, problem in (
        ("{", "JSON object"),
        ("", "no question"),
        ('{"goal": "x"}', "line 1: no field 'sol1'"),
        ("3", "sol1"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(TaskError, match=problem):
            read_rows(task, path)


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"), [("so 1,234.", "1234"), ("-3.5 m", "-3.5"), ("none", ""), ("2 then 7", "7"), ("#### 18", "18")]
)
def test_last_number(text: str, number: str) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{3}", "3"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("no box", ""),
        ("\\boxed{open", ""),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ],
)
def test_boxed(text: str, inside: str) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("0.5", "\\frac{1}{2}"),
        ("-\\tfrac{3}{4}", "-0.75"),
        ("1/2", "\\frac12"),
        ("1,000", "1000"),
        ("90^\\circ", "90"),
        ("50\\%", "50"),
        ("\\text{Evelyn}", "Evelyn"),
        ("7.", "7"),
    ],
)
def test_same_answer(given: str, right: str) -> None:
    assert same_answer(given, right)


@pytest.mark.parametrize(("given", "right"), [("", ""), ("", "1"), ("2", "3"), ("x", "y"), ("1/0", "2")])
def test_other_answer(given: str, right: str) -> None:
    assert not same_answer(given, right)
    assert as_number("x") is None


# ---- generated code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion",
    [
        "    return a + b\n",
        "```python\ndef add(a, b):\n    return a + b\n```\nThat is all.",
        "```python\n    return a + b\n",
        "def add(a, b):\n    return sum([a, b])\n",
    ],
)
def test_programs_from_completions(completion: str) -> None:
    row = ROWS["humaneval"]
    assert passes(program(row["prompt"], completion, row["test"], row["entry_point"]))


QUICK = Limits(cpu_seconds=1, memory=256, file=1, seconds=4)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(1 << 30)",
        "open('big', 'wb').write(bytes(2 << 20))",
        "raise SystemExit(3)",
        "syntax error",
        "\0",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_bad_programs_end(code: str) -> None:
    """Endless, asleep, greedy, wrong: False within the limits."""
    start = time.monotonic()
    assert not passes(code, QUICK)
    assert time.monotonic() - start < 10


def test_programs_inherit_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of their own, no environment, no files left behind, no child that lives on."""
    monkeypatch.setenv("SECRET", "1")
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = (
        "import os, subprocess, sys\n"
        "assert 'SECRET' not in os.environ and os.listdir() == ['program.py']\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    )
    assert passes(code)
    time.sleep(2.5)
    assert not mark.exists()


def test_code_runs_only_when_asked(tmp_path: Path) -> None:
    check_allowed(True, "humaneval")
    with pytest.raises(OptionError, match="--run-code"):
        check_allowed(False, "humaneval")
    ran = run_ace("eval", "model", "-p", "plan.safetensors", "--tasks", "humaneval", "-o", tmp_path / "eval.json")
    assert ran.code == 1 and "--run-code" in ran.err


# ---- a run --------------------------------------------------------------------------------------------------------


class MadeUp:
    """A harness that gets one question in four wrong for each 10 % skipped."""

    def __init__(self) -> None:
        self.skip, self.asked = 0.0, 0

    def set_skip(self, skip: float) -> None:
        self.skip = skip

    @property
    def realised(self) -> float:
        return self.skip

    def ask(self, name: str, rows: Sequence[Any] | None, limit: int | None) -> tuple[str, list[float]]:
        self.asked += 1
        wrong = round(self.skip * 10)
        return "acc", [float(i % 4 >= wrong) for i in range(limit or 100)]


def test_results_of_tasks(tmp_path: Path) -> None:
    """The unskipped model comes first, the others are compared with it question by question; nothing is asked twice."""
    path, harness = tmp_path / "eval.json", MadeUp()
    found = evaluate(harness, ["piqa"], [0.1, 0.0], {}, 100, path, {"limit": 100}, {})  # type: ignore[arg-type]
    dense, skipped = found["cells"]
    assert (dense["skip"], dense["value"], dense["change"]) == (0.0, 1.0, None)
    assert (skipped["value"], skipped["change"]["value"]) == (0.75, -0.25)
    assert skipped["interval"][0] < 0.75 < skipped["interval"][1] and skipped["change"]["high"] < 0
    assert json.loads(path.read_text()) == found
    again = evaluate(harness, ["piqa", "arc_easy"], [0.0, 0.1], {}, 100, path, {"limit": 100}, {})  # type: ignore[arg-type]
    assert harness.asked == 4 and len(again["cells"]) == 4
    assert again["cells"][:2] == found["cells"]


def test_the_unskipped_model_may_come_in_a_later_run(tmp_path: Path) -> None:
    """What was asked before it is compared with it all the same."""
    path, harness = tmp_path / "eval.json", MadeUp()
    for skips in ([0.1], [0.0]):
        found = evaluate(harness, ["piqa"], skips, {}, 100, path, {"limit": 100}, {})  # type: ignore[arg-type]
    skipped, dense = found["cells"]
    assert (skipped["change"]["value"], dense["change"]) == (-0.25, None)
    assert json.loads(path.read_text()) == found


def test_questions_of_one_task_are_not_mixed(tmp_path: Path) -> None:
    """Another task may join the file; other questions under one name may not, and each cell knows its run."""
    path, harness, rows = tmp_path / "eval.json", MadeUp(), {"piqa": [{"goal": "a"}]}
    record = {"command": "ace eval", "version": "1", "date": "now"}

    def run(tasks: list[str], given: dict[str, Any], command: str) -> dict[str, Any]:
        about = {"provenance": {**record, "command": command}}
        return evaluate(harness, tasks, [0.0], given, 100, path, {"limit": 100}, about)  # type: ignore[arg-type]

    run(["piqa"], rows, "ace eval one")
    found = run(["piqa", "arc_easy"], {**rows, "arc_easy": [{"query": "b"}]}, "ace eval two")
    assert [found["runs"][cell["run"]]["command"] for cell in found["cells"]] == ["ace eval one", "ace eval two"]
    for other in ({"piqa": [{"goal": "c"}]}, {}):
        with pytest.raises(ResultError, match="questions of piqa"):
            run(["piqa"], other, "ace eval three")
    assert json.loads(path.read_text()) == found
