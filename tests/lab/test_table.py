"""`benchmarks/table.py`: the rows of any stored result as Markdown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shown(name: str, *options: str) -> list[list[str]]:
    command = [sys.executable, ROOT / "benchmarks" / "table.py", ROOT / "benchmarks" / "results" / name, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("name", ["serving_h200.json", "latency_h200.json", "unions.json", "restore_h200.json"])
def test_every_row_has_every_column(name: str) -> None:
    head, rule, *rows = shown(name)
    assert rows and {len(row) for row in (rule, *rows)} == {len(head)}


def test_columns_and_rows_are_those_asked_for() -> None:
    options = ("--columns", "method,budget,kl", "--where", "gain=power", "budget=0.5", "method=share")
    head, rule, row = shown("compare_lab_moe.json", *options)
    assert head == ["method", "budget", "kl"] and rule == ["---", "--:", "--:"]
    assert row[:2] == ["share", "0.5"] and "–" in row[2]
