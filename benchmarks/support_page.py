"""docs/support.md, and the short table in README.md between its marks, from what tests ran; nothing is typed by hand.

    pytest --support benchmarks/results/support.json tests/integrations/test_families.py tests/checkpoint tests/kernels
    pytest --support benchmarks/results/support.json tests/serving/test_engine.py tests/serving/test_copies.py
    python benchmarks/support_page.py

The first two in each environment and on each machine there is: cells of several runs join.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "support.json"
AGREEMENT = RESULTS.with_name("serving_agreement_h200.json")
PAGE, README = ROOT / "docs" / "support.md", ROOT / "README.md"
MARKS = re.compile(r"<!-- support -->.*?<!-- /support -->", flags=re.S)
UNTRIED, PLAIN = "not tried", "plain"
COLUMNS = [("tables", "")] + [(e, p) for e in ("transformers", "kernels", "vLLM") for p in ("prefill", "decode")]
KNOWN = {  # families that people ask for by the names of their models
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B", "qwen3_5_moe": "Qwen3.5, Qwen3.6", "qwen3_next": "Qwen3-Next",
    "gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2", "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4", "glm4_moe": "GLM-4.5, 4.6, 4.7", "gemma4": "Gemma-4-26B-A4B", "minimax_m2": "MiniMax-M2",
    "mixtral": "Mixtral", "olmoe": "OLMoE", "ernie4_5_moe": "Ernie-4.5", "hunyuan_v1_moe": "Hunyuan-A13B",
    "llama4": "Llama-4",
}  # fmt: skip
HEAD = """# What runs where

Written by `python benchmarks/support_page.py` from what tests ran (`benchmarks/results/support.json`), on tiny models with random
weights in each family's own code; qwen3_moe on a GPU is a trained one (`serving_agreement_h200.json`). A cell names the machines
on which its tests passed; *not tried* means that no test ran there, not that it fails. **Tables** come from the checkpoint.
**transformers** is an attached model, **kernels** our own instead of its experts, **vLLM** its engine; each for prompts and for
generated tokens.

| run | transformers | vLLM | device | date |
|---|---|---|---|---|
"""
FORMATS = """
## Quantised checkpoints

**Tables**: equal to those of the decoded weights to 1e-5. **transformers**: the checkpoint in its published names, expanded and
attached, against float64. What each format is: [formats](formats.md).

| format | tables, in families | transformers, in families | kernels | vLLM |
|---|---|---|---|---|
"""


def load() -> dict[str, Any]:
    """What tests ran, and what a stored benchmark compared on a GPU."""
    found = json.loads(RESULTS.read_text())
    return found | {"cells": found["cells"] + agreed()}


def agreed() -> list[dict[str, Any]]:
    """vLLM with our kernels said the same tokens as transformers with ours on one GPU, and kept the same slots."""
    rows = [row for row in json.loads(AGREEMENT.read_text()).values() if isinstance(row, dict)]
    same = all(row["equal_tokens"] == row["tokens"] and row["kept"] == row["kept_transformers"] for row in rows)
    cell = {"family": "qwen3_moe", "stored": PLAIN, "device": "GPU", "answer": "yes", "why": ""}
    outcome = {"outcome": "passed" if rows and same else "failed"}
    return [{**cell, **outcome, "engine": e, "phase": p} for e, p in COLUMNS[1:]]


Cells = dict[tuple[str, str], dict[tuple[str, str], list[dict[str, Any]]]]


def by_place(cells: Iterable[dict[str, Any]]) -> Cells:
    """(family, format) → (engine, phase) → what ran there."""
    found: Cells = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        found[cell["family"], cell["stored"]][cell["engine"], cell["phase"]].append(cell)
    return found


def said(cells: list[dict[str, Any]], notes: list[str]) -> str:
    """The devices, the number of a refusal's reason, or that nothing ran."""
    if not cells:
        return UNTRIED
    if any(cell["outcome"] != "passed" for cell in cells):
        return "**fails**"
    where = ", ".join(sorted({cell["device"] for cell in cells}, reverse=True))
    partly = next((cell for cell in cells if cell["answer"] != "yes"), None)
    if partly is None:
        return where
    if partly["why"] not in notes:
        notes.append(partly["why"])
    number = f"[{notes.index(partly['why']) + 1}]"
    return f"no {number}" if partly["answer"] == "no" else f"{where}, one table {number}"


def families(cells: Cells, names: Iterable[str], notes: list[str], columns: list[tuple[str, str]]) -> list[str]:
    lines = [f"| family | {' | '.join(' '.join(c).strip() for c in columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for name in names:
        found = [said(cells[name, PLAIN][column], notes) for column in columns]
        known = f" ({KNOWN[name]})" if name in KNOWN else ""
        lines.append(f"| {name}{known} | {' | '.join(found)} |")
    return lines


def formats(cells: Cells) -> list[str]:
    """A line for each format: which families it was tried in."""
    lines = []
    for stored in sorted({s for _, s in cells} - {PLAIN}):
        row = []
        for engine in ("tables", "transformers", "kernels", "vLLM"):
            inside = {
                family: said([c for (e, _), own in places.items() if e == engine for c in own], [])
                for (family, s), places in cells.items()
                if s == stored and any(e == engine and own for (e, _), own in places.items())
            }
            row.append(grouped(inside))
        lines.append(f"| {stored} | {' | '.join(row)} |")
    return lines


def grouped(inside: dict[str, str]) -> str:
    """Families with where they were tried, each place once."""
    places = sorted(set(inside.values()))
    parts = [f"{', '.join(sorted(f for f, at in inside.items() if at == where))} ({where})" for where in places]
    return "; ".join(parts) or UNTRIED


def runs(results: dict[str, Any]) -> list[str]:
    lines = []
    for number, run in enumerate(results["runs"], 1):
        versions = [run["libraries"].get(name, "–") for name in ("transformers", "vllm")]
        lines.append(f"| {number} | {' | '.join([*versions, run['device'], run['date'][:10]])} |")
    return lines


def page() -> str:
    results, notes = load(), []
    cells = by_place(results["cells"])
    names = sorted({family for family, stored in cells if stored == PLAIN})
    table = families(cells, names, notes, COLUMNS)
    reasons = [f"{number}. {why}" for number, why in enumerate(notes, 1)]
    parts = [*runs(results), "", "## Families, unquantised", "", *table, "", "Why not:", "", *reasons]
    commands = ["", "The runs:", "", *(f"    {run['command']}" for run in results["runs"])]
    return HEAD + "\n".join(parts) + "\n" + FORMATS + "\n".join([*formats(cells), *commands]) + "\n"


def short() -> str:
    """The families people ask for, in a few lines: engines without their phases."""
    cells, lines = by_place(load()["cells"]), []
    for name, models in KNOWN.items():
        row = []
        for engine in ("transformers", "kernels", "vLLM"):
            found = said([c for (e, _), own in cells[name, PLAIN].items() if e == engine for c in own], [])
            row.append("no" if found.startswith("no [") else found)
        lines.append(f"| {models} | {' | '.join(row)} |")
    head = ["| models | transformers | kernels | vLLM |", "|---|---|---|---|"]
    return "\n".join(["<!-- support -->", *head, *lines, "<!-- /support -->"])


def readme() -> str:
    """With the short table between its marks, if they are there."""
    return MARKS.sub(lambda _: short(), README.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(readme())
