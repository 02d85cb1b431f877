"""Budget mapping: the histogram against a sort, ties, safeguards, correction on the real embedded model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_moe import ACE
from ace_moe.budget import check_budget
from ace_moe.errors import BudgetError
from ace_moe.mapping import Passes, fit_budgets
from ace_moe.mapping.fit import BINS, Fit, Histogram, quantile_fits
from ace_moe.mapping.recipe import corrected_fit, search
from ace_moe.policies import make

BUDGETS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def filled(values, mask=None):
    seen = Histogram()
    seen.add(values, mask)
    return seen


contributions = st.lists(
    st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, float("inf")]) | st.floats(0, 1, width=32), min_size=1, max_size=60
)


@settings(max_examples=300)
@given(contributions, st.floats(0, 1))
def test_threshold_is_the_closest_achievable_count(values, wanted):
    """Against a sort: no other threshold on a bin edge comes closer to the appendix's m_q."""
    seen = filled(torch.tensor(values)[None])
    tau = seen.threshold(wanted)
    candidates = torch.tensor([v for v in values if v != float("inf")])
    target = min(round(wanted * len(values)), len(candidates))
    skipped = int((candidates < tau).sum())
    bins = (candidates * BINS).long()
    achievable = {int((bins < e).sum()) for e in [*(bins + 1).tolist(), 0]}
    assert abs(skipped - target) == min(abs(a - target) for a in achievable)
    assert seen.ratio(tau) == pytest.approx(skipped / len(values))


def test_padding_and_protected_slots():
    values = torch.tensor([[0.1, float("inf")], [0.2, float("inf")], [0.3, float("inf")]])
    seen = filled(values, torch.tensor([True, True, False]))
    assert (seen.routed, seen.candidates, seen.limit) == (4, 2, 0.5)
    assert seen.ratio(seen.threshold(0.25)) == 0.25


def test_memory_does_not_grow_with_the_text():
    seen, size = Histogram(), None
    for seed in range(20):
        seen.add(torch.rand(1000, 8, generator=torch.Generator().manual_seed(seed)))
        size = size or seen.bins.numel()
        assert seen.bins.numel() == size
    assert seen.routed == 160_000
    assert seen.ratio(seen.threshold(0.3)) == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize("bad", [1, 1.5, -0.1, float("nan"), float("inf"), "half", None])
def test_what_is_no_budget(bad):
    with pytest.raises(BudgetError, match="fraction"):
        check_budget(bad, 8)


def test_limit_is_named():
    assert check_budget(0.75, 8, 2) == 0.75
    with pytest.raises(BudgetError, match=r"at most\s75\.0%"):
        check_budget(0.76, 8, 2)
    with pytest.raises(BudgetError, match=r"all but 50\.0%"):
        quantile_fits(filled(torch.tensor([[0.1, float("inf")]])), [0.6])
    with pytest.raises(BudgetError, match="no routed slot"):
        quantile_fits(Histogram(), [0.1])


def drifting(shift):
    """A model whose contributions move with τ, as a skipped model's do."""
    base = torch.rand(2000, 8, generator=torch.Generator().manual_seed(0))

    def run(tau):
        return filled((base * (1 + shift * tau)).clamp(0, 1))

    return run


@pytest.mark.parametrize("shift", [-0.3, 0.0, 0.3])
def test_correction_finds_the_fixed_point(shift):
    run = drifting(shift)
    (fit,) = quantile_fits(run(0.0), [0.5])
    found = corrected_fit(run, fit)
    assert abs(found.realised - 0.5) <= 5e-4
    assert found.corrected and 1 <= found.passes <= 6
    assert corrected_fit(run, Fit(0.0, 0.0, 0.0, 0, False)).passes == 0


def test_binary_search_agrees_and_costs_more_passes():
    run = drifting(0.3)
    found = search(run, 0.5)
    quantile = corrected_fit(run, quantile_fits(run(0.0), [0.5])[0])
    assert abs(found.realised - 0.5) <= 5e-4
    assert found.threshold == pytest.approx(quantile.threshold, abs=1e-2)
    assert found.passes > quantile.passes


def test_correction_keeps_the_best_pass(monkeypatch):
    """A model that never settles: the closest pass is returned and every pass is counted."""
    ratios = iter([0.40, 0.47, 0.60, 0.30, 0.20, 0.10])

    class Stub(Histogram):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def ratio(self, threshold):
            return self.value

        def threshold(self, wanted):
            return self.value

    found = corrected_fit(lambda tau: Stub(next(ratios)), Fit(0.5, 0.1, 0.5, 0, False))
    assert (found.realised, found.threshold, found.passes) == (0.47, 0.40, 6)


@pytest.mark.parametrize("min_active", [1, 2])
def test_realised_meets_the_request_on_the_embedded_model(demo_model, demo_plan, demo_windows, min_active):
    ace = ACE(demo_plan, policy=make("ace", min_active=min_active))
    with ace(demo_model):
        passes = Passes(ace.deciders, demo_model, demo_windows, batch=4)
        fits = fit_budgets(passes, BUDGETS)
        for fit in fits:
            assert abs(fit.realised - fit.budget) <= 1e-3
        assert passes.count == 1 + sum(fit.passes for fit in fits)
        passes(fits[-1].threshold)
        assert ace.realised == pytest.approx(fits[-1].realised, abs=1e-9), "the counters and the histogram agree"


def test_paper_maps_with_one_pass(demo_model, demo_plan, demo_windows):
    ace = ACE(demo_plan, preset="paper")
    with ace(demo_model):
        passes = Passes(ace.deciders, demo_model, demo_windows, batch=4)
        fits = fit_budgets(passes, BUDGETS, correct=False)
    assert passes.count == 1
    assert [f.passes for f in fits] == [0] * 6
    assert [f.threshold for f in fits] == sorted(f.threshold for f in fits)


def test_min_mass_limits_the_budget(demo_model, demo_plan, demo_windows):
    ace = ACE(demo_plan, min_mass=0.8)
    with ace(demo_model):
        passes = Passes(ace.deciders, demo_model, demo_windows, batch=4)
        with pytest.raises(BudgetError, match="safeguards protect"):
            fit_budgets(passes, [0.6], correct=False)
