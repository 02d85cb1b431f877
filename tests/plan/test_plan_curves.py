"""Any budget from one pass: the curve, the correction between measured points, and what a file may say of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import CODE, NEWS, SETTINGS, curve, edited, entry, found, plan_of, put
from torch import Tensor

from ace_moe.errors import BudgetError, PlanError
from ace_moe.plan import Plan
from ace_moe.policies import PRESETS, Ace, make

LINE = [[0.0, 0.5, 1.0], [0.0, 0.5, 0.75]]
BIN = 2.0**-20
STEPS = [[0.0, 0.25, 0.25 + BIN, 0.5, 0.5 + BIN, 1.0], [0.0, 0.0, 0.25, 0.25, 0.5, 0.5]]
rising = st.lists(st.floats(0.01, 1), min_size=2, max_size=8).map(lambda steps: np.cumsum(steps) / np.sum(steps))


@given(taus=rising, ratios=rising, budget=st.floats(0.001, 1))
def test_threshold_and_ratio_are_each_others_inverse(taus: np.ndarray, ratios: np.ndarray, budget: float) -> None:
    count = min(len(taus), len(ratios))
    made = curve([[0.0, *taus[:count]], [0.0, *ratios[:count]]])
    wanted = min(budget, made.limit)
    steepest = float((made.points[1].diff() / made.points[0].diff()).max())
    assert made.ratio(made.threshold(wanted)) == pytest.approx(wanted, abs=1e-5 + steepest * BIN), "τ is a bin's edge"


def test_steps_are_not_split() -> None:
    """The nearer end, in the middle of the τ that give it; what is expected of it is said."""
    plan = plan_of().with_curve(curve(STEPS, of=make("fixed").settings))
    for budget, tau, ratio in (
        (0.2, 0.375, 0.25),
        (0.3, 0.375, 0.25),
        (0.4, 0.75, 0.5),
        (0.5, 0.75, 0.5),
        (0.1, 0.0, 0.0),
    ):
        found = plan.lookup(make("fixed").settings, budget)
        assert found.threshold == pytest.approx(tau, abs=1e-6) and found.expected == ratio
        assert found.notice is not None
        assert ("steps" in found.notice) == (abs(ratio - budget) > 0.002)


def test_the_gain_shapes_no_contribution() -> None:
    """One curve serves all gains; what each does to states is its own correction."""
    plan = plan_of(entry(0.5, 0.52)).with_curve(curve(LINE))
    assert plan.lookup(SETTINGS, 0.4).how == "between"
    paper = plan.lookup(PRESETS["paper"].settings, 0.4)
    assert (paper.how, paper.threshold, paper.error) == ("uncorrected", pytest.approx(0.4), None)
    for other in (Ace(min_active=2), Ace(min_mass=0.1), Ace(fusion="min"), make("share")):
        with pytest.raises(BudgetError, match="no threshold"):
            plan.lookup(other.settings, 0.4)


def test_advice_spells_the_flags() -> None:
    with pytest.raises(BudgetError, match=r"--budgets 0\.5 --policy ace:fusion=min --gain kept --min-active 2`"):
        plan_of().lookup(Ace(fusion="min", gain="kept", min_active=2).settings, 0.5)
    with pytest.raises(BudgetError, match=r"--policy rcr:centred=false --gain power --min-mass 0\.25`"):
        plan_of().lookup(make("rcr", centred=False, min_mass=0.25).settings, 0.5)


def measured(*points: tuple[float, float]) -> Plan:
    return plan_of(*(entry(r, tau) for r, tau in points)).with_curve(curve([[0.0, 1.0], [0.0, 0.8]]))


def test_the_correction_is_a_line_through_measured_points() -> None:
    """0 at 0 and at the limit; the error is that of the neighbours, had they been left out."""
    plan = measured((0.2, 0.26), (0.4, 0.53), (0.6, 0.78))  # the curve says 0.208, 0.424, 0.624
    assert plan.lookup(SETTINGS, 0.4) == plan.lookup(SETTINGS, 0.4, workload="news.txt")
    assert plan.lookup(SETTINGS, 0.4).how == "measured" and plan.lookup(SETTINGS, 0.4).threshold == 0.53
    for budget, tau in ((0.1, 0.13), (0.3, 0.395), (0.5, 0.655), (0.7, 0.89)):
        found = plan.lookup(SETTINGS, budget)
        assert found.threshold == pytest.approx(tau, abs=1e-6) and found.expected == pytest.approx(budget, abs=1e-5)
    assert plan.lookup(SETTINGS, 0.3).error == pytest.approx(max(0.416 - 0.416, 0.424 - 0.416), abs=1e-6)
    assert "within 0.80 points" in (plan.lookup(SETTINGS, 0.3).notice or "")


@given(points=st.lists(st.tuples(st.integers(1, 78), st.floats(0.01, 0.99)), max_size=6, unique_by=lambda p: p[0]))
def test_a_larger_budget_never_gets_a_smaller_threshold(points: list[tuple[int, float]]) -> None:
    """Whatever was measured."""
    plan = measured(*((percent / 100, tau) for percent, tau in points))
    budgets = [b for b in np.linspace(0.005, 0.795, 40) if all(abs(b - p / 100) > 1e-6 for p, _ in points)]
    taus = [plan.lookup(SETTINGS, float(b)).threshold for b in budgets]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(taus))
    assert plan.lookup(SETTINGS, 0.8).threshold == pytest.approx(1.0)


def test_the_limit_is_the_texts() -> None:
    with pytest.raises(BudgetError, match=r"90\.0% cannot be met.*all but 80\.0% of the slots on news\.txt"):
        measured().lookup(SETTINGS, 0.9)


def test_small_budgets_follow_the_curve() -> None:
    """A straight line from the lowest mapped budget to 0 realised 0.5 % for 5 %."""
    bent = curve([[0.0, 0.3, 0.4, 1.0], [0.0, 0.01, 0.4, 0.8]])
    plan = plan_of(entry(0.4, 0.4)).with_curve(bent)
    assert bent.ratio(plan.lookup(SETTINGS, 0.05).threshold) == pytest.approx(0.05, abs=1e-5)


def test_uncorrected_entries_correct_nothing() -> None:
    from dataclasses import replace

    plan = plan_of(replace(entry(0.5, 0.9), corrected=False)).with_curve(curve([[0.0, 1.0], [0.0, 0.8]]))
    assert plan.lookup(SETTINGS, 0.4).how == "uncorrected" and plan.lookup(SETTINGS, 0.4).threshold == pytest.approx(
        0.5
    )
    assert found(plan.lookup(SETTINGS, 0.5)) == (0.9, None)


# ---- files ------------------------------------------------------------------------------------------------------------


def test_curves_come_back(tmp_path: Path) -> None:
    plan = plan_of(entry(0.5, 0.2)).with_curve(curve(LINE)).with_curve(curve(STEPS, CODE)).with_default(CODE)
    loaded = Plan.load(plan.save(tmp_path / "p.safetensors"))
    assert loaded == plan and [c.date for c in loaded.curves] == ["2026-11-16"] * 2
    assert loaded.default_workload == CODE.sha256
    replaced = loaded.with_curve(curve([[0.0, 1.0], [0.0, 0.7]]))
    assert [c.workload for c in replaced.curves] == [CODE, NEWS] and replaced.curves[1].limit == pytest.approx(0.7)


def drop(meta: dict[str, Any]) -> None:
    meta["curves"].clear()


BAD: dict[str, tuple[Callable[[Any], object], dict[str, Tensor], str]] = {
    "no list": (put("curves", value={}), {}, "curves is .*not a list"),
    "tensor missing": (put("curves", 0, "tensor", value="curves.7"), {}, "curves.0 and the list of curves disagree"),
    "tensor of nobody": (lambda meta: None, {"curves.3": torch.zeros(2, 2)}, "curves.3 and the list"),
    "not listed": (drop, {}, "curves.0 and the list"),
    "no settings": (lambda meta: meta["curves"][0].pop("params"), {}, "params"),
    "min_mass": (put("curves", 0, "min_mass", value=float("nan")), {}, "min_mass is nan, not a number"),
    "factor": (put("curves", 0, "factor", value="factor_x"), {}, "a curve names the factor table 'factor_x'"),
    "text": (put("curves", 0, "workload", "sha256", value=5), {}, "workload: sha256 is 5, not a text"),
    "default": (put("default_workload", value="f" * 64), {}, "is not the hash of one of the plan.s texts"),
    "default no text": (put("default_workload", value=[1]), {}, "default_workload is .*not a text"),
    "double": (lambda meta: None, {"curves.0": torch.zeros(2, 3).double()}, "float64"),
    "three rows": (lambda meta: None, {"curves.0": torch.zeros(3, 3)}, r"not float32 \[2, points\]"),
    "one point": (lambda meta: None, {"curves.0": torch.zeros(2, 1)}, r"not float32 \[2, points\]"),
    "huge": (lambda meta: None, {"curves.0": torch.zeros(2, 70_000)}, r"not float32 \[2, points\]"),
    "τ falls": (lambda meta: None, {"curves.0": torch.tensor([[0.0, 0.5, 0.4], [0, 0.1, 0.2]])}, "not a curve"),
    "τ too large": (lambda meta: None, {"curves.0": torch.tensor([[0.0, 2.5], [0, 0.1]])}, "not a curve"),
    "ratio falls": (lambda meta: None, {"curves.0": torch.tensor([[0.0, 0.5, 0.6], [0, 0.2, 0.1]])}, "not a curve"),
    "ratio above 1": (lambda meta: None, {"curves.0": torch.tensor([[0.0, 0.5], [0, 1.2]])}, "not a curve"),
    "NaN": (lambda meta: None, {"curves.0": torch.tensor([[0.0, 0.5], [0, float("nan")]])}, "not a curve"),
}


@pytest.mark.parametrize(("change", "tensors", "said"), BAD.values(), ids=BAD)
def test_bad_curves_are_refused(
    change: Callable[[Any], object], tensors: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    plan = plan_of(entry(0.5, 0.2)).with_curve(curve(LINE))
    with pytest.raises(PlanError, match=said):
        Plan.load(edited(plan, tmp_path / "p.safetensors", change, tensors))
