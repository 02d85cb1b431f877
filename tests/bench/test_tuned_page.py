"""The tables of docs/tuning.md are what their script writes from the stored results."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import tuned_page


def test_the_page_is_the_stored_results():
    assert tuned_page.PAGE.read_text(encoding="utf-8") == tuned_page.page()


def test_the_figures_are_those_of_the_candidates_measured():
    """The choice and what stands beside it are among them, and nothing is called best that is not."""
    for r in (*tuned_page.results(), tuned_page.load(tuned_page.WIKITEXT)):
        judged = r["judged"]
        mean = judged["mean_kl"]
        assert {judged["auto"], tuned_page.SHARE, tuned_page.ACE, tuned_page.PAPER} <= set(mean)
        for name, kls in mean.items():
            texts = [text[name]["kl"] for text in r["texts"].values()]
            assert kls == pytest.approx([sum(column) / len(texts) for column in zip(*texts, strict=True)], rel=1e-12)
        assert judged["met"] == (judged["behind"] <= 0.05) and judged["behind"] >= 0


def test_the_choice_is_nearest_by_kl_and_not_by_perplexity():
    """What docs/tuning.md says above the table of one text: against the default, the same without the mean, and the likeliest."""
    r = tuned_page.load(tuned_page.WIKITEXT)
    (text,), auto = r["texts"].values(), r["judged"]["auto"]
    for i, budget in enumerate(r["budgets"]):
        likely = min(text, key=lambda name: text[name]["perplexity_change"][i])
        rest = [text[name] for name in (tuned_page.SHARE, auto.removesuffix(tuned_page.MEAN), likely)]
        assert text[auto]["kl"][i] == min(one["kl"][i] for one in text.values()), budget
        assert all(text[auto]["perplexity_change"][i] > one["perplexity_change"][i] for one in rest), budget
        assert text[auto]["kl"][i] <= 0.9 * text[tuned_page.SHARE]["kl"][i], budget


def test_pairs_are_compared_at_the_budget():
    """A candidate that skips more than was asked is not charged for it: moved, its windows' mean is the KL at the budget."""
    text = {"x": {"by_window": [[0.1, 0.3], [0.3, 0.5]], "kl": [0.1, 0.2]}}
    moved = tuned_page.windows({"budgets": [0.4, 0.5], "texts": {"t": text}}, "x", True)
    assert [sum(kls) / 2 for kls in moved] == pytest.approx([0.1, 0.2]) and moved[0][1] == pytest.approx(
        3 * moved[0][0]
    )
    assert tuned_page.windows({"budgets": [0.4, 0.5], "texts": {"t": text}}, "x") == [[0.1, 0.3], [0.3, 0.5]]
