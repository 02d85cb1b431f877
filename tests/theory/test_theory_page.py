"""The page says what is stored, of four models."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "theory.md").read_text()
ROWS = {r["model"]: r["mean"] for r in json.loads((ROOT / "benchmarks/results/theory.json").read_text())["rows"]}
GAINS = ("kept", "power", "none")
MODELS = ("demo-moe", "lab-moe", "lab-olmoe", "lab-glm")
LINES = {
    "bound over ‖f(x)‖, median": ("{:.0f}×", "bound_over_response"),
    "rank correlation with ‖f(x)‖: the bound": ("{:.2f}", "bound_rank"),
    "… GSP": ("{:.2f}", "gsp_rank"),
    "… RCR": ("{:.2f}", "rcr_rank"),
    "… the gate itself": ("{:.2f}", "gate_rank"),
    "‖mean of rows‖ over mean ‖row‖": ("{:.2f}", "shared_part_of_rows"),
    "cosine of the observed shift with w̃": ("{:.2f}", "shift_row"),
    "… with Σw̃": ("{:.2f}", "shift_tilted"),
    "ACE": ("{:.3f}", "mass_ace"),
    "GSP, RCR at the same τ": ("{:.3f}", "mass_gsp_same_tau", "mass_rcr_same_tau"),
    "GSP, RCR at the same number of slots": ("{:.3f}", "mass_gsp_same_budget", "mass_rcr_same_budget"),
    **{f"`{g}`: bound over truth; rank correlation": ("{:.2f}", f"{g}_over_truth", f"{g}_rank") for g in GAINS},
    **{f"`{g}`: ‖y − ŷ‖ / ‖y‖": ("{:.2f}", f"{g}_error") for g in GAINS},
}


def test_every_number_is_stored() -> None:
    for title, (form, *names) in LINES.items():
        cells = [" / ".join(form.format(ROWS[model][name]) for name in names) for model in MODELS]
        assert f"| {title} | {' | '.join(cells)} |" in PAGE


def test_what_the_page_concludes_holds() -> None:
    for found in ROWS.values():
        assert found["bound_over_response"] > 100 and found["gsp_rank"] > found["bound_rank"]
        assert found["shift_tilted"] > 0.85 > 0.6 > found["shift_row"]
        assert found["mass_gsp_same_budget"] < found["mass_ace"] < found["mass_gsp_same_tau"]
        assert found["kept_error"] > 1.4 * max(found["power_error"], found["none_error"])
        assert all(3 < found[f"{g}_over_truth"] < 5 for g in GAINS)
    assert ROWS["lab-glm"]["shared_part_of_rows"] > 0.5 > 0.2 > ROWS["lab-moe"]["shared_part_of_rows"]
