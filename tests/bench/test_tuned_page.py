"""The tables of docs/tuning.md are what their script writes from the stored results."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import tuned_page


def test_the_page_is_the_stored_results():
    assert tuned_page.PAGE.read_text(encoding="utf-8") == tuned_page.page()


def test_the_figures_are_those_of_the_candidates_measured():
    """The choice and what stands beside it are among them, and nothing is called best that is not."""
    for r in tuned_page.results():
        judged = r["judged"]
        mean = judged["mean_kl"]
        assert {judged["auto"], tuned_page.SHARE, tuned_page.ACE, tuned_page.PAPER} <= set(mean)
        for name, kls in mean.items():
            texts = [text[name]["kl"] for text in r["texts"].values()]
            assert kls == [sum(column) / len(texts) for column in zip(*texts, strict=True)]
        assert judged["met"] == (judged["behind"] <= 0.05) and judged["behind"] >= 0
