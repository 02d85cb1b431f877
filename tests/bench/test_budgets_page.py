"""docs/budgets.md is what its script writes from the stored results."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import budgets_page


def test_the_page_is_the_stored_results():
    assert budgets_page.PAGE.read_text() == budgets_page.page()
    assert budgets_page.CHOOSING.read_text() == budgets_page.choosing()


def test_what_it_says_of_restore_holds():
    """Experts read as by the plain rule, and the loss that is left."""
    for row in budgets_page.load("restore_quality.json")["rows"]:
        assert row["kl_ratio"] < 0.5 and row["restored"]["reads"]["ratio"] <= row["plain"]["reads"]["ratio"] + 0.001


def test_what_it_says_of_tracking_is_of_whole_spans():
    """A stream shorter than the span behind its first tokens would be one mean, not the worst of many."""
    rows = budgets_page.load("tracking.json")["rows"]
    assert all(row["tokens"] >= 20000 + 4000 for row in rows)
    assert len({(row["model"], row["batch"], row["asked"]) for row in rows}) == len(rows)
