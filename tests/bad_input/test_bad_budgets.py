"""A budget that is no fraction, one that cannot be reached or is not mapped, and settings out of range say what is possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_input_cases import TOP_K, Refuse, budget_arguments, run_arguments

from ace_moe import ACE, build_plan
from ace_moe.budget import check_budget
from ace_moe.checkpoint.loading import load_model
from ace_moe.errors import BudgetError, PolicyError
from ace_moe.plan import Plan
from ace_moe.plan.entries import Threshold, Workload
from ace_moe.policies import make, policy_for


@pytest.mark.parametrize("value", ["1", "1.5", "-1", "-0.001", "nan", "inf", "1e999"])
def test_budget_that_is_no_fraction(value: str, originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """The same words for the command that maps, the command that runs, and the class."""
    says = ("a fraction from 0 to less than 1", "such as 0.5")
    refuse(*budget_arguments(originals / "single", plan, text, budgets=value), says=says)
    refuse(*run_arguments(originals / "single", plan), f"--skip={value}", says=says)
    with pytest.raises(BudgetError, match=r"such as 0\.5"):
        ACE.load(plan, float(value))


@pytest.mark.parametrize("value", ["half", None, [0.5], 10**400], ids=["text", "none", "list", "huge"])
def test_budget_that_is_no_number(value: Any, plan: Path) -> None:
    with pytest.raises(BudgetError, match=r"such as 0\.5; .* is not a number"):
        ACE.load(plan, value)


@pytest.mark.parametrize("value", [0.3, None, "0.3", {"prefill": 0.3, "decode": 0.5}, [], np.array([])])
def test_budgets_of_sequences_that_are_no_list(value: Any, originals: Path, plan: Path) -> None:
    model = load_model(originals / "single", device="cpu")
    with (
        ACE.load(plan)(model) as ace,
        pytest.raises(BudgetError, match="a budget for each sequence"),
        ace.budgets(value),
    ):
        pass


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, str])
def test_a_number_of_another_library_is_the_budget_that_was_mapped(kind: Any, demo_plan: Plan) -> None:
    text, settings = Workload("a text", "0" * 64, 100), make("share").settings
    known = {"budget": 0.3, "threshold": 0.07, "realised": 0.3, "corrected": True, "passes": 3, "workload": text}
    mapped = demo_plan.with_thresholds([Threshold(**settings, **known)])
    ace = ACE(mapped, kind(0.3))
    assert ace.thresholds.tolist() == pytest.approx([0.07] * 3)
    assert type(ace.skip) is float and json.dumps(ace.report()["skip"]) == "0.3"


@pytest.mark.parametrize("value", ["half", "", "0.5;0.6", "0.5:0.1:0.1"])
def test_budgets_that_cannot_be_read(value: str, originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    says = ("0.1:0.6:0.1 (from : to : step)", repr(value))
    refuse(*budget_arguments(originals / "single", plan, text, budgets=value), says=says)


@pytest.mark.parametrize(("min_active", "limit"), [(1, "75.0%"), (2, "50.0%"), (4, "0.0%"), (9, "0.0%")])
def test_budget_above_the_limit(
    min_active: int, limit: str, originals: Path, plan: Path, text: Path, refuse: Refuse
) -> None:
    """(k − min_active) / k is all that can be skipped, and the message says how much that is."""
    says = ("4 slots a token", f"at most {limit} can be skipped", "Lower the budget")
    options = ("--min-active", min_active)
    refuse(*run_arguments(originals / "single", plan), "--skip", 0.76, *options, says=says)
    refuse(*budget_arguments(originals / "single", plan, text, budgets="0.1,0.76"), *options, says=says)
    assert check_budget(float(limit[:-1]) / 100, TOP_K, min_active) >= 0


def test_budget_that_the_safeguards_leave_no_room_for(originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    """Known only after a pass, because it depends on the gates; the plan is untouched all the same."""
    says = ("the safeguards protect all but", "Lower the budget, min_active or min_mass")
    refuse(*budget_arguments(originals / "single", plan, text, budgets="0.7"), "--min-mass", 0.9, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--min-active", 0), ("min_active", "at least 1")),
        (("--min-active", -3), ("min_active", "at least 1")),
        (("--min-mass", 2), ("min_mass", "0 to 1")),
        (("--min-mass", -0.1), ("min_mass", "0 to 1")),
        (("--min-mass", "nan"), ("min_mass", "0 to 1")),
        (("--policy", "nonsense"), ("'nonsense'", "ace, gsp, rcr, share")),
        (("--gain", "nonsense"), ("'nonsense'", "kept, none, power")),
        (("--preset", "nonsense"), ("'nonsense'", "paper")),
        (("--preset", "paper", "--gain", "nonsense"), ("'nonsense'", "kept, none, power")),
        (("--max-new-tokens", 0), ("nothing to generate", "--max-new-tokens")),
        (("--skip", 0.6), ("it has 50%", "`ace plan MODEL --plan PLAN --text FILE --budgets 0.6 --policy")),
        (("--skip", 0.5, "--workload", "none.txt"), ("no workload 'none.txt'", "it has:")),
        (("--skip", 0.5, "--gain", "none"), ("gain none", "it has none for these settings", "ace plan")),
        (("--skip", 0.5, "--preset", "paper"), ("gain kept", "it has none for these settings", "ace plan")),
    ],
    ids=str,
)
def test_setting(
    options: tuple[object, ...], says: tuple[str, ...], originals: Path, plan: Path, refuse: Refuse
) -> None:
    """Each names the setting and what it may be."""
    refuse(*run_arguments(originals / "single", plan), *options, says=says)


def test_a_wrong_setting_is_not_the_plans(plan: Path) -> None:
    """A plan chooses the policy where none is named; what was typed beside it is no mistake of the plan."""
    with pytest.raises(PolicyError, match=r"^gain must be one of"):
        policy_for(Plan.load(plan), gain="nonsense")


def test_skip_before_any_threshold_is_mapped(originals: Path, tmp_path: Path, refuse: Refuse) -> None:
    """The plan straight from `ace plan MODEL -o FILE`: the next command is in the message."""
    plan = build_plan(originals / "single").save(tmp_path / "new.safetensors")
    says = (
        "no threshold",
        "it has none for these settings",
        "`ace plan MODEL --plan PLAN --text FILE --budgets 0.3 --policy share:squared=false --gain power`",
    )
    refuse(*run_arguments(originals / "single", plan), says=says)
