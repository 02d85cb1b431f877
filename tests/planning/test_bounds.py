"""Budgets in other words: a bound on KL, and a part of the experts read, found by the model itself on the text."""

import pytest
import torch

from ace_moe import ACE
from ace_moe.errors import BudgetError
from ace_moe.mapping import bounds, least_reading, map_budgets, most_within
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


@torch.no_grad()
def test_decode_steps_read_what_was_asked_for(demo_model, demo_plan, demo_windows):
    """Executed: steps of 16 sequences, whose experts are counted in the layers."""
    text, policy = windows_of(demo_windows.ids[:1], "one"), make("share")
    found, plan = least_reading(demo_model, demo_plan, policy, text, 0.75, 16)
    ids = demo_windows.ids[:, :240].reshape(16, 60)
    with ACE(plan, {"prefill": 0.0, "decode": found}, policy=policy, reads=True)(demo_model) as ace:
        cache = demo_model(ids[:, :40], use_cache=True).past_key_values
        for i in range(40, 60):
            cache = demo_model(ids[:, i : i + 1], past_key_values=cache).past_key_values
        assert ace.report()["reads"]["generated"]["ratio"] == pytest.approx(0.75, abs=0.05)


def test_safeguards_end_the_search(demo_model, demo_plan, windows):
    """Where they protect more than the floor does, what is left is the most, not an error about a budget nobody asked for."""
    policy = make("share", min_mass=0.7)
    found, plan = most_within(demo_model, demo_plan, policy, windows, 100.0)
    limit = plan.curve(policy.settings, windows.workload.sha256).limit
    assert limit < 0.7 and limit - 0.01 < found <= limit
    with pytest.raises(BudgetError, match=f"At most {limit:.1%} can be skipped"):
        least_reading(demo_model, demo_plan, policy, windows, 0.01, 16)


def test_what_cannot_be_met_is_refused(demo_model, demo_plan, windows):
    for search, bound in ((most_within, (0.1,)), (least_reading, (0.5, 16))):
        with pytest.raises(BudgetError, match=r"'oea'"):
            search(demo_model, demo_plan, make("oea"), windows, *bound)
    with pytest.raises(BudgetError, match="still read"):
        least_reading(demo_model, demo_plan, make("share"), windows, 0.01, 16)
