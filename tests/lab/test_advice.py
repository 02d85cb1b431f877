"""What a comparison advises: least KL, ties by perplexity, no further than is near, nothing a server would refuse."""

from __future__ import annotations

from typing import Any

from ace_moe.lab.compare.grid import Grid
from ace_moe.lab.compare.verdict import advise


def cell(method: str, gain: str, budget: float, kl: float, perplexity: float = 10.0) -> dict[str, Any]:
    found = {"value": kl, "low": 0.9 * kl, "high": 1.1 * kl}
    return {
        "method": method,
        "gain": gain,
        "budget": budget,
        "kl": found,
        "agreement": {"value": 0.95},
        "perplexity": perplexity,
    }


def results(*cells: dict[str, Any], preset: str = "") -> dict[str, Any]:
    servable = {c["method"]: "preset" if c["method"] == preset else "policy" for c in cells}
    return {"cells": list(cells), "servable": servable, "workload": {"windows": 8, "name": "t.txt"}}


def test_the_nearest_is_advised_as_far_as_it_is_near() -> None:
    share = [cell("share", "power", b, kl) for b, kl in ((0.5, 0.08), (0.3, 0.02), (0.4, 0.045))]
    found = advise(
        results(*share, cell("ace", "kept", 0.3, 0.05), cell("ace", "kept", 0.4, 0.1), cell("ace", "kept", 0.5, 0.2))
    )
    assert (
        found is not None and found["words"].startswith("share with gain power") and "0.0200 at 30 %" in found["words"]
    )
    assert found["commands"] == ["ace plan MODEL --policy share --gain power --budgets 0.4 -o plan.safetensors",
                                 "ace serve MODEL --plan plan.safetensors --skip 0.4"]  # fmt: skip


def test_near_equals_are_decided_by_perplexity() -> None:
    found = advise(results(cell("share", "power", 0.3, 0.020, 11.0), cell("gsp", "power", 0.3, 0.0205, 10.0)))
    assert found is not None and found["words"].startswith("gsp ") and "within 5 % of the nearest" in found["words"]


def test_the_command_is_the_method_that_was_measured() -> None:
    """`cited` is the method's own gain and no gain by itself; safeguards go along; a file's words are quoted."""
    safeguards = {"identity": {"safeguards": {"min_active": 2, "min_mass": 0.5}}}
    found = advise(results(cell("ace", "cited", 0.3, 0.02)) | safeguards)
    assert found is not None
    assert found["commands"][0] == (
        "ace plan MODEL --policy ace --min-active 2 --min-mass 0.5 --budgets 0.3 -o plan.safetensors"
    )
    found = advise(results(cell("share; rm -r x", "power", 0.3, 0.02)))
    assert found is not None and "--policy 'share; rm -r x' --gain" in found["commands"][0]


def test_far_at_every_budget_says_so() -> None:
    found = advise(results(cell("paper", "kept", 0.3, 0.2), preset="paper"))
    assert found is not None and "begin lower" in found["words"] and "--preset paper --budgets" in found["commands"][0]


def test_what_cannot_be_served_is_not_advised() -> None:
    found = advise(results(cell("share", "power", 0.3, 0.02)) | {"cells": [cell("oracle", "power", 0.3, 0.001)]})
    assert found is None


def test_a_comparison_knows_what_every_engine_serves() -> None:
    methods = ("share", "ace:fusion=min", "fixed", "paper", "oracle", "xshare", "modes")
    grid = Grid(methods, (0.5,), ("power",), {})
    assert grid.servable() == {"share": "policy", "ace:fusion=min": "policy", "fixed": "policy", "paper": "preset"}
