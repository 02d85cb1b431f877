"""The page "Which should I use?": its table is stored, its files are there, and what it says of the order of methods holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ace_moe.evaluate.grid import FIRST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text()
MODELS = ("demo-moe", "lab-olmoe", "lab-glm")
STEPS = (0.25, 0.375, 0.5)


def results(model: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"compare_{model.replace('-', '_')}.json").read_text())


def best(found: dict[str, Any], method: str, step: float) -> float:
    """KL with the better of the gains that were measured."""
    cells = [c for c in found["cells"] if (c["method"], c["budget"]) == (method, step)]
    assert cells and all(abs(c["realised"] - step) < 0.01 for c in cells), (method, step)
    return min(c["kl"]["value"] for c in cells)


def test_the_table_is_what_is_stored() -> None:
    stored = {model: results(model) for model in MODELS}
    assert f"| | {' | '.join(MODELS)} |" in PAGE
    for method in FIRST:
        cells = [" / ".join(f"{best(stored[m], method, step):.4f}" for step in STEPS) for m in MODELS]
        assert f"| `{method}` | {' | '.join(cells)} |" in PAGE


def test_what_it_concludes_holds() -> None:
    for model in MODELS:
        found = results(model)
        kl = {method: best(found, method, 0.5) for method in FIRST}
        assert kl["share"] < kl["fixed"] < kl["ace"] < kl["paper"]
        said = {"demo-moe": "by 40 %", "lab-olmoe": "by 2 % on lab-olmoe", "lab-glm": "by 5 % on lab-glm"}[model]
        assert f"by {100 * (1 - kl['share'] / kl['fixed']):.0f} %" in said and said in PAGE


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
