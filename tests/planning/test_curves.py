"""The curve that a pass leaves in the plan: as good as its histogram, small, and enough for any budget without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.errors import BudgetError
from ace_moe.lab.policies import prepare
from ace_moe.mapping import Passes, map_budgets
from ace_moe.mapping.fit import BINS, Histogram, curve_of, points
from ace_moe.mapping.passes import attached, observe, read_through
from ace_moe.plan import Plan
from ace_moe.policies import PRESETS, Policy, make
from ace_moe.text import Windows, windows_of

CLOSE = 2e-4  # 0.02 points
POLICIES: dict[str, Policy] = {
    "share": make("share"),
    "top_p": make("top_p"),
    "ace": make("ace"),
    "modes": make("modes"),
    "two active": make("share", min_active=2),
    "mass": make("ace", min_mass=0.3),
    "factors, one layer guarded": make("top_p", factor="factor_test"),
    "fixed": make("fixed"),
}


@pytest.fixture(scope="module")
def factored(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Plan:
    factors = {key: {"factor_test": torch.tensor(1 / (1 + n))} for n, key in enumerate(demo_plan.tables)}
    plan = demo_plan.with_tables(factors, guarded={"factor_test": ["0"]})
    return prepare(plan, make("modes"), demo_model, demo_windows)


@pytest.fixture(scope="module")
def seen(demo_model: PreTrainedModel, factored: Plan, demo_windows: Windows) -> dict[str, Histogram]:
    """One dense pass for all."""
    return observe(demo_model, factored, POLICIES, lambda: read_through(demo_model, demo_windows))[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_any_budget_as_from_the_histogram(name: str, seen: dict[str, Histogram], demo_windows: Windows) -> None:
    """A thousand budgets up to the limit: never further from the budget by more than 0.02 points. Tied slots cannot be split
    (gates in bf16 are, often), so the histogram itself may miss."""
    histogram, made = seen[name], curve_of(seen[name], POLICIES[name], demo_windows.workload)
    ratios, budgets = histogram.ratios(), np.random.default_rng(0).uniform(0.01, histogram.limit, 1000)
    edges = np.ceil(np.array([made.threshold(budget) for budget in budgets]) * BINS).astype(int)
    above = np.searchsorted(ratios, budgets).clip(max=len(ratios) - 1)
    best = np.minimum(np.abs(ratios[above] - budgets), np.abs(ratios[above - 1] - budgets))
    assert (np.abs(ratios[edges] - budgets) <= best + CLOSE).all()
    assert made.limit == pytest.approx(histogram.limit, abs=1e-6)
    assert made.points.nbytes < 16 << 10 and made.points.shape[1] >= 2


def test_what_guards_leave_is_the_end(seen: dict[str, Histogram], demo_windows: Windows) -> None:
    """Protected slots count as routed."""
    limits = {name: curve_of(seen[name], POLICIES[name], demo_windows.workload).limit for name in POLICIES}
    assert limits["share"] == pytest.approx(7 / 8, abs=1e-6) and limits["two active"] == pytest.approx(6 / 8, abs=1e-6)
    assert limits["factors, one layer guarded"] == pytest.approx(7 / 8 * 5 / 6, abs=1e-6)
    assert limits["mass"] < 7 / 8


def test_fixed_is_exact_at_its_steps(seen: dict[str, Histogram], demo_windows: Windows) -> None:
    made = curve_of(seen["fixed"], POLICIES["fixed"], demo_windows.workload)
    for slots in range(1, 8):
        assert seen["fixed"].ratio(made.threshold(slots / 8)) == pytest.approx(slots / 8, abs=1e-9)


values = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")]) | st.floats(0, 1, width=32), min_size=1, max_size=80
)


@settings(max_examples=30)
@given(values, st.floats(0.01, 1))
def test_few_slots_are_steps(slots: list[float], budget: float) -> None:
    """Every slot of a tiny text is a step of its own, ties included: the curve chooses as the histogram does."""
    histogram = Histogram()
    histogram.add(torch.tensor(slots)[None])
    made = curve_of(histogram, make("share"), windows_of(torch.zeros(1, 2, dtype=torch.long), "x").workload)
    mine, best = (abs(histogram.ratio(of.threshold(budget)) - min(budget, histogram.limit)) for of in (made, histogram))
    assert mine <= best + CLOSE + 0.5 / len(slots), "the histogram rounds to whole slots"


def test_many_steps_stay_small() -> None:
    """Five thousand slots of different contribution: less precise, never larger."""
    histogram = Histogram()
    histogram.add(torch.linspace(0, 1, 5000)[None].square())
    assert points(histogram).nbytes < 16 << 10


# ---- in use -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mapped(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Plan:
    return map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.2, 0.4, 0.6]).plan


@pytest.mark.slow
def test_budgets_never_mapped_are_realised(demo_model: PreTrainedModel, mapped: Plan, demo_windows: Windows) -> None:
    """Executed on the text of the curve, above and below what was measured, within what is said.

    A thousand tokens: ties make steps of a tenth of a point."""
    with attached(demo_model, mapped, make("share")) as deciders:
        passes = Passes(deciders, demo_model, demo_windows, 4)
        for budget in (0.05, 0.3, 0.47, 0.55, 0.7):
            found = mapped.lookup(make("share").settings, budget)
            assert found.how == "between" and found.error is not None
            realised = passes(found.threshold).ratio(found.threshold)
            assert abs(realised - budget) <= max(found.error, 2e-3) + 1e-3, (budget, realised)


def test_no_model_is_called(demo_model: PreTrainedModel, mapped: Plan) -> None:
    ace, calls = ACE(mapped, 0.4, policy="share"), []
    with ace(demo_model):
        handle = demo_model.register_forward_pre_hook(lambda *_: calls.append(1))
        try:
            for budget in (0.05, 0.31, 0.777):
                with pytest.warns(UserWarning, match="the largest measured budget|between measured budgets"):
                    ace.set_skip(budget)
        finally:
            handle.remove()
    assert calls == []
    with pytest.raises(BudgetError, match="cannot be met"):
        ace.set_skip(0.88)


def test_one_curve_for_all_gains(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> None:
    """Mapped with the default gain, the paper's preset needs no pass: its τ is the dense curve's."""
    plan = map_budgets(demo_model, demo_plan, make("ace"), demo_windows, [0.5], correct=False).plan
    with pytest.warns(UserWarning, match="not corrected"):
        ace = ACE(plan, 0.3, preset="paper")
    own = map_budgets(demo_model, demo_plan, PRESETS["paper"], demo_windows, [0.3])
    assert float(ace.thresholds[0]) == pytest.approx(own.fits[0].threshold, rel=2e-3)


def test_a_second_run_starts_from_the_curve(
    demo_model: PreTrainedModel, mapped: Plan, demo_windows: Windows, tmp_path: Path
) -> None:
    """A further budget costs its correction alone; a further gain too."""
    plan = Plan.load(mapped.save(tmp_path / "plan.safetensors"))
    for policy in (make("share"), make("share", gain="kept")):
        asked: list[float] = []

        def run(model: PreTrainedModel, windows: Windows, batch: int, asked: list[float] = asked) -> None:
            asked.append(1)
            read_through(model, windows, batch)

        more = map_budgets(demo_model, plan, policy, demo_windows, [0.5], run=run)
        assert 1 <= len(asked) <= 3 and more.passes.results.keys() and 0.0 not in more.passes.results
        assert more.fits[0].realised == pytest.approx(0.5, abs=5e-4)
        assert more.plan.curves == plan.curves


def test_searched_policies_keep_points(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> None:
    policy = make("oea", refill=False, group=16)
    plan = map_budgets(demo_model, demo_plan, policy, windows_of(demo_windows.ids[:1, :64], "one"), [0.3]).plan
    assert plan.curves == () and plan.lookup(policy.settings, 0.3).how == "measured"
    assert "interpolated" in (plan.lookup(policy.settings, 0.2).notice or "")
