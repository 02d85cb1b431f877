"""How a budget finds the right τ in a plan, or none: settings, workloads, phases."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import CODE, NEWS, SETTINGS, curve, entry, found, plan_of

from ace_moe import ACE
from ace_moe.errors import BudgetError
from ace_moe.plan import OWN, Phase, Threshold, Workload, labels
from ace_moe.policies import Ace, Share
from ace_moe.policies.forms import Fixed

LINE = [[0.0, 0.5, 1.0], [0.0, 0.5, 0.75]]
NUMBERS = st.floats(0, 1, allow_nan=False)


@given(thresholds=st.lists(st.tuples(st.integers(1, 99), NUMBERS), min_size=1, max_size=8, unique_by=lambda t: t[0]))
def test_exact_look_up(thresholds: list[tuple[int, float]]) -> None:
    """A mapped budget gives its own τ and no notice, also when it comes out of arithmetic."""
    plan = plan_of(*(entry(percent / 100, tau) for percent, tau in thresholds))
    for percent, tau in thresholds:
        assert found(plan.lookup(SETTINGS, percent / 100)) == (tau, None)
        assert found(plan.lookup(SETTINGS, percent * 0.01)) == (tau, None)


@pytest.mark.parametrize(
    "other",
    [
        Ace(gain="kept").settings,
        Ace(min_active=2).settings,
        Ace(min_mass=0.1).settings,
        Ace(fusion="min").settings,
        Share().settings,
    ],
)
def test_look_up_is_exact_on_settings(other: dict[str, Any]) -> None:
    """A τ mapped under other settings realises another ratio, so it is not used; the error names what to run."""
    plan = plan_of(entry(0.5, 0.2), entry(0.3, 0.1, of=other))
    assert found(plan.lookup(other, 0.3)) == (0.1, None)
    with pytest.raises(BudgetError, match=r"it has 30% for these settings.*`ace plan.*--budgets 0\.5 --policy"):
        plan.lookup(other, 0.5)


@given(share=st.floats(0.01, 0.99))
def test_interpolation_is_noted(share: float) -> None:
    """Between two mapped budgets τ is linear, and the notice names both ends."""
    plan = plan_of(entry(0.2, 0.1), entry(0.6, 0.3))
    tau, notice = found(plan.lookup(SETTINGS, 0.2 + share * 0.4))
    assert math.isclose(tau, 0.1 + share * 0.2, rel_tol=1e-9)
    assert notice is not None
    assert "20%" in notice
    assert "60%" in notice
    assert f"{tau:.6f}" in notice


def test_interpolation_starts_at_zero() -> None:
    """Budget 0 is τ = 0 without an entry, so a budget under the smallest mapped one is between two."""
    tau, notice = found(plan_of(entry(0.4, 0.2)).lookup(SETTINGS, 0.1))
    assert tau == pytest.approx(0.05)
    assert notice is not None
    assert "between 0% and 40%" in notice


def test_nothing_is_extrapolated() -> None:
    """Above the largest mapped budget τ is unknown; the error lists what there is."""
    with pytest.raises(BudgetError, match=r"50\.0%.*it has 20%, 40% for these settings.*ace plan"):
        plan_of(entry(0.2, 0.1), entry(0.4, 0.2)).lookup(SETTINGS, 0.5)


@pytest.mark.parametrize("phase", ["both", "prefill", "decode", "verify"])
def test_budget_zero_needs_no_entry(phase: Phase) -> None:
    assert found(plan_of().lookup(SETTINGS, 0.0, phase)) == (0.0, None)
    assert ACE(plan_of(), 0).realised == 0


# ---- workloads --------------------------------------------------------------------------------------------------


def test_the_first_text_is_the_default() -> None:
    """A later text changes nothing for those who name none, until it is made the default."""
    plan = plan_of().with_thresholds([entry(0.5, 0.2, CODE)]).with_thresholds([entry(0.5, 0.3, NEWS)])
    assert plan.lookup(SETTINGS, 0.5).threshold == 0.2
    assert plan.lookup(SETTINGS, 0.5, workload="news.txt").threshold == 0.3
    assert plan.with_default(NEWS).lookup(SETTINGS, 0.5).threshold == 0.3
    more = plan.with_thresholds([entry(0.6, 0.4, NEWS)])
    with pytest.raises(BudgetError, match="it has 50%"):
        more.lookup(SETTINGS, 0.6)


def test_own_text_gives_way_to_a_given_one() -> None:
    own = Workload(OWN, "e" * 64, 2048)
    plan = plan_of().with_thresholds([entry(0.5, 0.1, own)])
    assert plan.lookup(SETTINGS, 0.5).threshold == 0.1
    given = plan.with_thresholds([entry(0.5, 0.2, CODE)])
    assert given.lookup(SETTINGS, 0.5).threshold == 0.2
    assert given.with_thresholds([entry(0.5, 0.15, own)]).lookup(SETTINGS, 0.5).threshold == 0.2
    assert given.with_thresholds([entry(0.5, 0.3, NEWS)]).lookup(SETTINGS, 0.5).threshold == 0.2
    assert given.with_default(own).with_curve(curve(LINE, NEWS)).default_workload == NEWS.sha256


def test_schema_1_takes_the_newest() -> None:
    """It names no default; what is mapped later does not move it."""
    plan = plan_of(entry(0.5, 0.2, CODE), entry(0.5, 0.3, NEWS))
    assert plan.lookup(SETTINGS, 0.5).threshold == 0.3
    later = plan.with_thresholds([entry(0.5, 0.4, Workload("third.txt", "f" * 64, 10))])
    assert later.lookup(SETTINGS, 0.5).threshold == 0.3


def test_settings_the_default_does_not_have() -> None:
    """Then the newest text that has them."""
    plan = (
        plan_of().with_thresholds([entry(0.5, 0.2, CODE)]).with_thresholds([entry(0.5, 0.3, NEWS, of=Share().settings)])
    )
    assert plan.lookup(Share().settings, 0.5).threshold == 0.3


SAME_NAME = [Workload("news.txt", digest + "0" * 58, 1024) for digest in ("abcd12", "abcd34", "ff0000")]


def test_two_texts_of_one_name() -> None:
    """They go by their tokens: shown apart, each found, and the bare name refused with the list."""
    plan = plan_of(*(entry(0.5, 0.1 * (n + 1), text) for n, text in enumerate(SAME_NAME)), entry(0.5, 0.9, CODE))
    shown = labels(plan.workloads)
    assert list(shown.values()) == ["news.txt#abcd1", "news.txt#abcd3", "news.txt#ff00", "code.txt"]
    for n, text in enumerate(SAME_NAME):
        assert plan.lookup(SETTINGS, 0.5, workload=shown[text.sha256]).threshold == pytest.approx(0.1 * (n + 1))
    for bad in ("news.txt", "news.txt#abcd", "news.txt#"):
        with pytest.raises(BudgetError, match=r"several texts.*news\.txt#abcd1, news\.txt#abcd3.*Name one"):
            plan.lookup(SETTINGS, 0.5, workload=bad)
    with pytest.raises(BudgetError, match=r"no workload .news\.txt#0"):
        ACE(plan, 0.5, workload="news.txt#0")
    with pytest.raises(BudgetError, match="no workload"):
        ACE(plan, 0.0, workload="nobody")


def test_workloads_are_not_mixed() -> None:
    """Interpolating between thresholds of two texts would promise a ratio neither has."""
    plan = plan_of(entry(0.2, 0.1, CODE), entry(0.6, 0.5, CODE), entry(0.4, 0.2, NEWS))
    tau, notice = found(plan.lookup(SETTINGS, 0.2))
    assert tau == pytest.approx(0.1)
    assert notice is not None
    with pytest.raises(BudgetError, match="it has 40%"):
        plan.lookup(SETTINGS, 0.6)


def test_unknown_workload_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"no workload 'poems\.txt'; it has: news\.txt\..*ace plan"):
        plan_of(entry(0.5, 0.2)).lookup(SETTINGS, 0.5, workload="poems.txt")


def test_same_entry_is_replaced() -> None:
    """Settings, budget, phase and text make an entry; mapping it again leaves one, the newest, at the end."""
    plan = plan_of(entry(0.5, 0.2), entry(0.3, 0.1)).with_thresholds([entry(0.5, 0.25)])
    assert plan.thresholds == (entry(0.3, 0.1), entry(0.5, 0.25))


@pytest.mark.parametrize(
    "other",
    [
        entry(0.4, 0.25),
        entry(0.5, 0.25, CODE),
        entry(0.5, 0.25, phase="decode"),
        entry(0.5, 0.25, of=Ace(gain="kept").settings),
        entry(0.5, 0.25, Workload("news.txt", "f" * 64, 1024)),
    ],
    ids=["budget", "workload", "phase", "settings", "content of the same file name"],
)
def test_other_entries_are_kept(other: Threshold) -> None:
    plan = plan_of(entry(0.5, 0.2)).with_thresholds([other])
    assert plan.thresholds == (entry(0.5, 0.2), other)


# ---- phases -----------------------------------------------------------------------------------------------------


def test_phases_have_their_own_thresholds() -> None:
    """An entry for one phase serves that phase alone; an entry for both serves each."""
    plan = plan_of(entry(0.5, 0.2, phase="prefill"), entry(0.5, 0.3, phase="decode"))
    assert plan.lookup(SETTINGS, 0.5, "prefill").threshold == 0.2
    assert plan.lookup(SETTINGS, 0.5, "decode").threshold == 0.3
    with pytest.raises(BudgetError, match="no threshold"):
        plan.lookup(SETTINGS, 0.5, "both")
    assert plan_of(entry(0.5, 0.4)).lookup(SETTINGS, 0.5, "decode").threshold == 0.4


def test_ace_takes_a_budget_per_phase() -> None:
    """Prefill and decode may skip differently; verify follows decode unless it is named."""
    plan = plan_of(entry(0.5, 0.2), entry(0.25, 0.1))
    assert ACE(plan, 0.5).thresholds.tolist() == pytest.approx([0.2, 0.2, 0.2])
    assert ACE(plan, {"prefill": 0.5, "decode": 0.25}).thresholds.tolist() == pytest.approx([0.2, 0.1, 0.1])
    given = {"prefill": 0.0, "decode": 0.25, "verify": 0.5}
    assert ACE(plan, given).thresholds.tolist() == pytest.approx([0.0, 0.1, 0.2])
    with pytest.raises(BudgetError, match="prefill and decode"):
        ACE(plan, {"warmup": 0.5})


def test_ace_passes_the_notice_on() -> None:
    with pytest.warns(UserWarning, match="interpolated"):
        ACE(plan_of(entry(0.5, 0.2)), 0.3)
    with pytest.warns(UserWarning, match="differ by phase"):
        ACE(plan_of(entry(0.5, 0.2)), {"prefill": 0.5, "decode": 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ACE(plan_of(entry(0.5, 0.2)), 0.5)


# ---- settings that say nothing ----------------------------------------------------------------------------------


def test_denominator_zero_is_none() -> None:
    """Older plans have it among the params of "fixed"; 0 stands for the model's own, as if it were not there."""
    old = {**Fixed().settings, "params": {"denominator": 0}}
    new = {**Fixed().settings, "params": {}}
    for mapped, asked in ((old, new), (new, old), (old, old)):
        assert found(plan_of(entry(0.5, 0.2, of=mapped)).lookup(asked, 0.5)) == (0.2, None)
    assert plan_of(entry(0.5, 0.2, of=old)).with_thresholds([entry(0.5, 0.3, of=new)]).thresholds == (
        entry(0.5, 0.3, of=new),
    )
    with pytest.raises(BudgetError, match="it has none for these settings"):
        plan_of(entry(0.5, 0.2, of=old)).lookup({**new, "params": {"denominator": 4}}, 0.5)


def test_a_factor_is_a_setting() -> None:
    """A τ mapped with layer factors is another τ; without one the settings are as they always were."""
    scaled = {**SETTINGS, "factor": "factor_branch"}
    plan = plan_of(entry(0.5, 0.2), entry(0.5, 0.1, of=scaled))
    assert found(plan.lookup(SETTINGS, 0.5)) == (0.2, None)
    assert found(plan.lookup({**SETTINGS, "factor": None}, 0.5)) == (0.2, None)
    assert found(plan.lookup(scaled, 0.5)) == (0.1, None)
    assert plan.thresholds[0].settings["factor"] is None
    with pytest.raises(BudgetError, match="factor factor_other"):
        plan.lookup({**SETTINGS, "factor": "factor_other"}, 0.5)
