"""A budget from a bound on KL, found by the model itself on the text."""

import pytest

from ace_moe.errors import BudgetError
from ace_moe.mapping import bounds, map_budgets, most_within
from ace_moe.mapping.passes import judge
from ace_moe.policies import make
from ace_moe.text import windows_of


@pytest.fixture(scope="module")
def windows(demo_windows):
    return windows_of(demo_windows.ids[:2, :128], "short")


@pytest.mark.long
def test_the_bound_on_kl_is_kept_and_used(demo_model, demo_plan, windows):
    policy, bound = make("share"), 0.1
    found, plan = most_within(demo_model, demo_plan, policy, windows, bound)
    assert 0.05 <= found < 0.875
    taus = [plan.lookup(policy.settings, b).threshold for b in (found, found + 0.01)]
    within, beyond = (f["kl"]["value"] for f in judge(demo_model, plan, policy, windows, taus))
    assert within <= bound < beyond


def test_the_threshold_that_was_judged_is_the_one_that_is_kept(demo_model, demo_plan, windows, monkeypatch):
    """Also where the plan has corrected thresholds of this text, between which others would lie."""
    policy, judged = make("share"), []
    had = map_budgets(demo_model, demo_plan, policy, windows, [0.3, 0.5]).plan
    monkeypatch.setattr(bounds, "judge", lambda *given: judged.extend(given[4]) or judge(*given))
    found, plan = most_within(demo_model, had, policy, windows, 0.1)
    kept = map_budgets(demo_model, plan, policy, windows, [found], correct=False).entries
    assert kept[0].threshold in judged


def test_nothing_may_be_skipped(demo_model, demo_plan, windows):
    assert most_within(demo_model, demo_plan, make("share"), windows, 1e-9)[0] == 0


def test_safeguards_end_the_search(demo_model, demo_plan, windows):
    """Where they protect more than the floor does, what is left is the most, not an error about a budget nobody asked for."""
    policy = make("share", min_mass=0.7)
    found, plan = most_within(demo_model, demo_plan, policy, windows, 100.0)
    limit = plan.curve(policy.settings, windows.workload.sha256).limit
    assert limit < 0.7 and limit - 0.01 < found <= limit


def test_a_policy_without_a_curve_is_refused(demo_model, demo_plan, windows):
    with pytest.raises(BudgetError, match=r"'oea'"):
        most_within(demo_model, demo_plan, make("oea"), windows, 0.1)
