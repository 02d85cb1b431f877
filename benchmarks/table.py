"""Stored results as a Markdown table: one line for each row, or for each cell.

    python benchmarks/table.py benchmarks/results/serving_h200.json --columns what,batch,way,median_ms,speed
    python benchmarks/table.py benchmarks/results/compare_lab_moe.json --where gain=power budget=0.5

Without --columns all that hold a number, a word or a value with an interval. `ace report` shows comparisons, thresholds, tasks,
simulations and times as a page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROWS = ("rows", "cells", "studies", "transfers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rows", default=None, help=f"the list to show; default: the first of {', '.join(ROWS)}")
    parser.add_argument("--columns", default=None, help="names, separated by commas")
    parser.add_argument("--where", nargs="*", default=[], help="name=value, of the rows to show")
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    name = options.rows or next((name for name in ROWS if isinstance(results.get(name), list)), None)
    if name not in results:
        parser.error(
            f"{options.results} has no list of {options.rows or ' or '.join(ROWS)}: it has {', '.join(results)}"
        )
    wanted = dict(part.split("=", 1) for part in options.where)
    rows = [row for row in results[name] if all(shown(row.get(key)) == value for key, value in wanted.items())]
    print(table(rows, options.columns.split(",") if options.columns else None))


def table(rows: list[dict[str, Any]], columns: list[str] | None = None) -> str:
    """The rows as lines of Markdown, numbers on the right."""
    names = columns or [
        name for name in dict.fromkeys(n for row in rows for n in row) if any(shown(r.get(name)) for r in rows)
    ]
    numbers = [all(isinstance(row.get(name), (int, float, dict, type(None))) for row in rows) for name in names]
    lines = [names, ["--:" if number else "---" for number in numbers]]
    lines += [[shown(row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """A word, a number, or a value with its interval; nothing for lists and other objects."""
    if isinstance(value, dict) and "value" in value:
        bounds = "" if value.get("low") is None else f" ({value['low']:.4g} – {value['high']:.4g})"
        return f"{value['value']:.4g}{bounds}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|") if isinstance(value, (int, str)) else ""


if __name__ == "__main__":
    main()
