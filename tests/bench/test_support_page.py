"""docs/support.md is what its script writes from what tests ran, and cells of several runs join."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import support_page

import support
import zoo
from ace_moe.provenance import provenance


def test_the_page_is_what_tests_ran():
    assert support_page.PAGE.read_text() == support_page.page()


def test_every_family_is_on_the_page():
    """A family that the zoo gets and no run has seen would be missing without a word."""
    page = support_page.PAGE.read_text()
    assert [f for f in zoo.families() if f"\n| {f} " not in page] == []
    assert "**fails**" not in page


def cell(**other):
    return {
        **{
            "family": "a",
            "stored": "plain",
            "engine": "tables",
            "phase": "",
            "device": "CPU",
            "why": "",
            "answer": "yes",
        },
        "outcome": "passed",
        **other,
    }


def test_cells_of_several_runs_join(tmp_path):
    path, record = tmp_path / "support.json", provenance(argv=["pytest"])
    support.store(path, [cell(), cell(outcome="failed"), cell(family="b")], {**record, "command": "first"})
    support.store(path, [cell(device="GPU"), cell(outcome="passed")], {**record, "command": "second"})
    found = json.loads(path.read_text())
    assert [(c["family"], c["device"], c["outcome"], c["run"]) for c in found["cells"]] == [
        ("a", "CPU", "passed", 1),
        ("a", "GPU", "passed", 1),
        ("b", "CPU", "passed", 0),
    ]
    support.store(path, [cell(family="b", outcome="failed"), cell()], {**record, "command": "third"})
    found = json.loads(path.read_text())
    assert [run["command"] for run in found["runs"]] == ["second", "third"], "a run without cells is forgotten"
    cells = support_page.by_place(found["cells"])
    assert support_page.said(cells["b", "plain"]["tables", ""], []) == "**fails**"
    assert support_page.said(cells["a", "plain"]["tables", ""], []) == "GPU, CPU"
    assert support_page.said(cells["c", "plain"]["tables", ""], []) == "not tried"
