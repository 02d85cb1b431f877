"""`ace reproduce` runs the commands one could type, fills every cell or says why not, and goes on where it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import OptionError
from ace_moe.lab.compare import cells as comparison
from ace_moe.lab.reproduce import TABLES, Setup, paper, tables
from ace_moe.lab.reproduce.tables import FUSIONS, METHODS
from ace_moe.policies import PRESETS, make
from command import Ran, run_ace

SMALL = ("--text", TEXT, "--tokens", 256, "--window", 128)


def setup(name: str = "demo", folder: Path = Path("out"), **more: Any) -> Setup:
    return Setup(str(MODEL), name, folder, TEXT, (Path("a.txt"), Path("MATH-500.jsonl")), **more)


def reproduced(folder: Path, table: str, *more: object) -> Ran:
    return run_ace("reproduce", MODEL, "--table", table, *SMALL, "-o", folder, "--json", *more)


def check_filled(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, cells in found.items():
        assert cells, name
        for cell in cells:
            assert (cell["value"] is None) != (cell["refused"] is None), cell
            assert cell["refused"] != "not measured yet", cell


@pytest.mark.long
def test_killed_and_resumed_it_says_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit, begun = comparison.fit_budgets, []

    def killed(passes: Any, budgets: list[float], **more: Any) -> Any:
        begun.append((str(passes.policy.settings), *budgets))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return fit(passes, budgets, **more)

    monkeypatch.setattr(comparison, "fit_budgets", killed)
    first = reproduced(tmp_path, "fusion", "--budgets", "0.3,0.5")
    assert first.code == 130 and not (tmp_path / "tables.md").exists()
    assert len(json.loads((tmp_path / "compare.json").read_text())["cells"]) == 2
    again = reproduced(tmp_path, "fusion", "--budgets", "0.3,0.5").json
    assert len(begun) == 7 and len(set(begun)) == 6, "the cell that was running is measured again, no other"
    check_filled(again["tables"])
    typed = json.loads(run_ace(
        "compare", MODEL, *SMALL, "--methods", ",".join(FUSIONS.values()), "--gains", "cited", "--budgets", "0.3,0.5",
        "--no-correct", "-o", tmp_path / "typed.json", "--json",
    ).out) and json.loads((tmp_path / "typed.json").read_text())  # fmt: skip
    values = {(c["row"], c["column"]): c["value"] for c in again["tables"]["fusion"]}
    for c in typed["cells"]:
        row = next(name for name, method in FUSIONS.items() if method == c["method"])
        assert values[row, f"{c['budget']:.0%} PPL"] == c["perplexity"]
    assert values["BF16", "PPL"] == typed["dense"]["perplexity"]
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert stored["command"].startswith("ace compare") and "--no-correct" in stored["command"]
    begun.clear()
    assert reproduced(tmp_path, "fusion", "--budgets", "0.3,0.5").json == again and not begun
    page = (tmp_path / "tables.md").read_text()
    assert "ace compare" in page and str(tmp_path) not in page


def test_other_sizes_are_not_mixed_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(json.dumps({"schema": 1, "kind": "compare", "identity": {}, "cells": []}))
    found = reproduced(tmp_path, "components", "--budgets", "0.3").json
    assert "another measurement" in found["refused"]["components: perplexity"]
    check_filled(found["tables"])


def test_what_is_missing_is_said_before_and_after(tmp_path: Path) -> None:
    said = run_ace("reproduce", MODEL, *SMALL, "-o", tmp_path / "none", "--dry-run")
    assert said.code == 0 and not (tmp_path / "none").exists()
    for word in (*TABLES, "GPU", "two workloads"):
        assert word in " ".join(said.out.split())
    found = reproduced(tmp_path, "stability").json
    assert "two workloads" in found["refused"]["stability: thresholds"]
    assert run_ace("reproduce", MODEL, *SMALL, "--table", "other").code == 1


def test_a_table_without_a_budget_that_was_asked_for_measures_nothing(tmp_path: Path) -> None:
    """No budgets are not the default ones, which nobody asked for."""
    found = reproduced(tmp_path, "components", "--budgets", "0.2").json
    assert "none of this table's budgets" in found["refused"]["components: perplexity"]
    assert not (tmp_path / "compare.json").exists()
    check_filled(found["tables"])


def test_methods_are_the_papers_with_its_gain() -> None:
    for method in {**METHODS, **FUSIONS}.values():
        policy = PRESETS.get(method) or make(method)
        moved = method.startswith(("modes", "sere"))  # one leaves gates as they are, one gives them to the first slot
        assert policy.gain == ("none" if moved else "kept"), method


def test_figures_of_the_paper_stand_beside_its_models_alone() -> None:
    assert all(c.paper is None for t in tables(setup(), "all") for c in t.cells)
    own = {t.name: t for t in tables(setup("Qwen3-30B-A3B-Instruct-2507"), "all")}
    for name, table in own.items():
        printed = [c for c in table.cells if c.paper is not None]
        assert len(printed) == len(table.cells) if name != "stability" else 6, name
    at = {(c.row, c.column): c.paper for c in own["main"].cells}
    assert at["ACE", "50% PPL"] == 8.85 and at["ACE", "50% Acc."] == 74.3 and at["BF16", "PPL"] == 7.52
    assert {(c.row, c.column): c.paper for c in own["fusion"].cells}["Min", "50% Acc."] == 73.12
    assert paper.threshold("x/Gemma-4-26B-A4B-it", "MATH-500", 0.6) == 0.122829
    assert paper.quality("google/gemma-4-26b-a4b-it", "ACE", 0.6) == (None, 72.11)
    with pytest.raises(OptionError, match="no table"):
        tables(setup(), "tab:main")


def test_steps_of_one_name_are_one_step() -> None:
    """A step may serve two tables; two that differ must not be taken for one."""
    steps = [step for table in tables(setup(), "all") for step in table.steps]
    assert len({step.name for step in steps}) == len({(step.name, step.argv) for step in steps}) < len(steps)


@pytest.mark.slow
def test_all_tables_of_the_demo(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(Path(TEXT).read_text()[4000:30000])
    found = reproduced(tmp_path / "out", "all", "--workload", TEXT, "--workload", other).json
    check_filled(found["tables"])
    assert set(found["tables"]) == set(TABLES)
    measured = {n: sum(c["value"] is not None for c in cells) for n, cells in found["tables"].items()}
    assert measured["stability"] == 12 and measured["cost"] == 3 and measured["latency"] == 20
    assert measured["main"] >= 1 + 6 * 10
