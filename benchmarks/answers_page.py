"""The tasks' section of docs/choosing.md from the stored result of benchmarks/answers.py.

python benchmarks/answers_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "results" / "answers_h200.json", ROOT / "docs" / "choosing.md"
BEGIN, END, BEFORE = "<!-- tasks: from the stored result -->\n", "<!-- tasks: end -->\n\n", "## Which method"
TITLES = {"lambada": "LAMBADA", "piqa": "PIQA", "arc_easy": "ARC-E", "sciq": "SciQ"}
HEAD = """## On tasks

{head}

"""
TAIL = """
{changed}

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


def shown(rows: list[Row]) -> list[Row]:
    """Of models that are above chance on the task."""
    known = {(r["model"], r["task"]) for r in rows if r["way"] == "dense" and above(r)}
    return [r for r in rows if (r["model"], r["task"]) in known]


def head(rows: list[Row], asked: list[str]) -> str:
    """What is shown and what is not, and how far a threshold of another text is off."""
    silent = [f"{r['model']} on {TITLES[r['task']]}" for r in rows if r["way"] == "dense" and not above(r)]
    missing = [name for name in asked if not any(r["model"] == name for r in rows)]
    off = max(abs(r["realised"] - r["budget"]) for r in rows)
    return fill(
        "Small models know little, so a task speaks only where the unskipped model is above chance."
        + (f" At chance, and left out: {', '.join(silent)}." if silent else "")
        + (f" Not reached by the run: {', '.join(missing)}." if missing else "")
        + " Accuracy in per cent with its 95 % interval, and in brackets how many answers are the unskipped model's own. `auto` "
        f"is {next(r['policy'] for r in rows if r['way'] == 'auto')}. Thresholds come from another text, so that up to "
        f"{100 * off:.1f} points more or less are skipped ([stored](../benchmarks/results/answers_h200.json)).",
        width=125,
    )


def changed(rows: list[Row]) -> str:
    """How many paired changes of accuracy are clear of 0, by way."""
    said = []
    for way in dict.fromkeys(r["way"] for r in rows if r["way"] != "dense"):
        found = [r["change"] for r in rows if r["way"] == way]
        up, down = sum(c["low"] > 0 for c in found), sum(c["high"] < 0 for c in found)
        said.append(f"`{way}` is above the unskipped model in {up} and below it in {down} of {len(found)} cells")
    return fill(f"By paired intervals clear of 0, {'; '.join(said)}.", width=125)


def section() -> str:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    command = result["provenance"]["command"]
    rows, asked = result["rows"], command.split(" --")[0].split()[1:]
    tail = TAIL.format(changed=changed(shown(rows)), command=command)
    return HEAD.format(head=head(rows, asked)) + table(rows) + tail


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
