"""The tasks' section of docs/choosing.md from the stored result of benchmarks/answers.py.

python benchmarks/answers_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "results" / "answers_h200.json", ROOT / "docs" / "choosing.md"
BEGIN, END, BEFORE = "<!-- tasks: from the stored result -->\n", "<!-- tasks: end -->\n\n", "## Which method"
TITLES = {"lambada": "LAMBADA", "piqa": "PIQA", "arc_easy": "ARC-E", "sciq": "SciQ"}
HEAD = """## On tasks

Small models know little, so a task speaks only where the unskipped model is above chance: {shown}.
{silent}Accuracy in per cent with its 95 % interval, and in brackets how many answers are the unskipped model's own; thresholds
come from another text ([stored](../benchmarks/results/answers_h200.json)).

"""
TAIL = """
Accuracy can hold or rise while answers change. The answers that stay say whether it is still the model you validated.

    python benchmarks/{command}
"""
Row = dict[str, Any]


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def above(row: Row) -> bool:
    return row["accuracy"]["low"] > row["chance"]


def cell(row: Row) -> str:
    found = row["accuracy"]
    said = f"{percent(found['value'])} ({percent(found['low'])}–{percent(found['high'])})"
    return said if row["way"] == "dense" else f"{said} [{percent(row['agreement']['value'])}]"


def of(rows: list[Row], dense: Row, way: str, budget: float) -> Row:
    here = (dense["model"], dense["task"], way, budget)
    return next(r for r in rows if (r["model"], r["task"], r["way"], r["budget"]) == here)


def table(rows: list[Row]) -> str:
    kinds = list(dict.fromkeys((r["way"], r["budget"]) for r in rows if r["way"] != "dense"))
    head = ["model, task, questions", "dense", *(f"`{way}` {100 * budget:.0f} %" for way, budget in kinds)]
    lines = [head, ["---"] * len(head)]
    for dense in (r for r in rows if r["way"] == "dense" and above(r)):
        name = f"{dense['model']}, {TITLES[dense['task']]}, {dense['questions']:,}"
        lines.append([name, cell(dense), *(cell(of(rows, dense, *kind)) for kind in kinds)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section() -> str:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    dense = [r for r in result["rows"] if r["way"] == "dense"]
    named = {w: [f"{r['model']} on {TITLES[r['task']]}" for r in dense if above(r) == w] for w in (True, False)}
    silent = f"At chance, and left out: {', '.join(named[False])}. " if named[False] else ""
    head = HEAD.format(shown=", ".join(named[True]), silent=silent)
    return head + table(result["rows"]) + TAIL.format(command=result["provenance"]["command"])


def page(text: str) -> str:
    """The page with its section made again, or put in where it belongs."""
    head, begun, rest = text.partition(BEGIN)
    if begun:
        tail = rest.partition(END)[2]
    else:
        head, _, rest = text.partition(BEFORE)
        tail = BEFORE + rest
    return head + BEGIN + section() + END + tail


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
