"""The tasks' section of docs/choosing.md from the stored result of benchmarks/answers.py.

python benchmarks/answers_page.py
"""

from __future__ import annotations

from pages import DOCS, RESULTS, Row, load, percent, table, wrapped, written

RESULT, PAGE = RESULTS / "answers_h200.json", DOCS / "choosing.md"
TITLES = {"lambada": "LAMBADA", "piqa": "PIQA", "arc_easy": "ARC-E", "sciq": "SciQ"}
SECTION = """## On tasks

{head}

{table}
{changed}

Accuracy can hold or rise while answers change. The answers that stay say whether it is still the model you validated.

    python benchmarks/{command}
"""


def above(row: Row) -> bool:
    return row["accuracy"]["low"] > row["chance"]


def cell(row: Row) -> str:
    value, low, high = (f"{100 * row['accuracy'][name]:.1f}" for name in ("value", "low", "high"))
    same = "" if row["way"] == "dense" else f" [{100 * row['agreement']['value']:.1f}]"
    return f"{value} ({low}–{high}){same}"


def of(rows: list[Row], dense: Row, way: str, budget: float) -> Row:
    here = (dense["model"], dense["task"], way, budget)
    return next(r for r in rows if (r["model"], r["task"], r["way"], r["budget"]) == here)


def accuracies(rows: list[Row]) -> str:
    kinds = list(dict.fromkeys((r["way"], r["budget"]) for r in rows if r["way"] != "dense"))
    columns = ["model, task, questions", "dense", *(f"`{way}` {percent(budget)}" for way, budget in kinds)]
    lines = []
    for dense in (r for r in rows if r["way"] == "dense" and above(r)):
        name = f"{dense['model']}, {TITLES[dense['task']]}, {dense['questions']:,}"
        lines.append([name, cell(dense), *(cell(of(rows, dense, *kind)) for kind in kinds)])
    return table(columns, lines, rule=" --- ")


def shown(rows: list[Row]) -> list[Row]:
    """Of models that are above chance on the task."""
    known = {(r["model"], r["task"]) for r in rows if r["way"] == "dense" and above(r)}
    return [r for r in rows if (r["model"], r["task"]) in known]


def head(rows: list[Row], asked: list[str]) -> str:
    """What is shown and what is not, and how far a threshold of another text is off."""
    silent = [f"{r['model']} on {TITLES[r['task']]}" for r in rows if r["way"] == "dense" and not above(r)]
    missing = [name for name in asked if not any(r["model"] == name for r in rows)]
    off = max(abs(r["realised"] - r["budget"]) for r in rows)
    return wrapped(
        "Small models know little, so a task speaks only where the unskipped model is above chance."
        + (f" At chance, and left out: {', '.join(silent)}." if silent else "")
        + (f" Not reached by the run: {', '.join(missing)}." if missing else "")
        + " Accuracy in per cent with its 95 % interval, and in brackets how many answers are the unskipped model's own. `auto` "
        f"is {next(r['policy'] for r in rows if r['way'] == 'auto')}. Thresholds come from another text, so that up to "
        f"{100 * off:.1f} points more or less are skipped ([stored](../benchmarks/results/answers_h200.json))."
    )


def changed(rows: list[Row]) -> str:
    """How many paired changes of accuracy are clear of 0, by way; a few that fell are named."""
    said = []
    for way in dict.fromkeys(r["way"] for r in rows if r["way"] != "dense"):
        found = [r for r in rows if r["way"] == way]
        up, down = sum(r["change"]["low"] > 0 for r in found), [r for r in found if r["change"]["high"] < 0]
        named = [f"{r['model']}, {TITLES[r['task']]}, {percent(r['budget'])}" for r in down] if len(down) < 5 else []
        below = f"below it in {len(down)} of {len(found)} cells" + (f" ({'; '.join(named)})" if named else "")
        said.append(f"`{way}` is above the unskipped model in {up} and {below}")
    return wrapped(f"By paired intervals clear of 0, {'; '.join(said)}.")


def page() -> str:
    result = load(RESULT.name)
    rows, command = result["rows"], result["runs"][-1]["command"]
    parts = {"head": head(rows, command.split(" --")[0].split()[1:]), "changed": changed(shown(rows))}
    return written(PAGE, tasks=SECTION.format(**parts, table=accuracies(rows), command=command))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
