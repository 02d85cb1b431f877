"""A plan works on the model it was made for, and on one with other weights by permission; a model it does not fit,
or that has one already, stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bad_input_cases import LAYERS, TOP_K, Refuse, budget_arguments, run_arguments, save_moe

from ace_moe import ACE, AceError, Plan
from ace_moe.checkpoint.loading import load_model
from ace_moe.errors import IntegrationError, PlanError, StructureError
from command import run_ace


def test_plan_of_another_structure(plan: Path, text: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Named is what differs; the permission for other weights does not reach this far."""
    model = save_moe(tmp_path / "wide", num_experts=16)
    says = ("another model (single)", "experts 8 in the plan, 16 in the model", "ace plan")
    refuse(*run_arguments(model, plan), "--allow-other-weights", says=says)
    refuse(*budget_arguments(model, plan, text), says=says)


def test_plan_of_other_weights(originals: Path, plan: Path, text: Path, refuse: Refuse) -> None:
    model = originals / "other"
    says = ("same shape but other router weights", "ace plan", "allow_other_weights")
    refuse(*run_arguments(model, plan), says=says)
    refuse(*budget_arguments(model, plan, text), says=says)


def test_other_weights_allowed_are_recorded(originals: Path, plan: Path, text: Path) -> None:
    """Permission is given once: `budget` writes it into the plan, `run` needs it no more."""
    model = originals / "other"
    assert run_ace(*budget_arguments(model, plan, text), "--allow-other-weights").code == 0
    assert len(Plan.load(plan).other_weights) == 1
    assert run_ace(*run_arguments(model, plan)).code == 0
    assert run_ace(*run_arguments(originals / "single", plan)).code == 0


def test_attaching_twice(originals: Path, plan: Path) -> None:
    """The same plan or another on the same model; the first stays in force and can be taken off."""
    model = load_model(originals / "single", "cpu")
    first, second = ACE.load(plan, 0.5), ACE.load(plan, 0.5)
    with first(model):
        with pytest.raises(IntegrationError, match=r"attached to a model already. Call `ace\.detach\(\)`"):
            first.attach(model)
        with pytest.raises(IntegrationError, match=r"already has a plan attached. Detach it first"):
            second.attach(model)
        model(torch.ones(1, 9, dtype=torch.long))
    assert first.report()["prefill"]["routed"] == 9 * LAYERS * TOP_K
    with second(model):
        model(torch.ones(1, 9, dtype=torch.long))
    assert second.report()["prefill"]["routed"] == 9 * LAYERS * TOP_K


@pytest.mark.parametrize(("name", "error"), [("dense", StructureError), ("other", PlanError)])
def test_attaching_to_a_wrong_model_leaves_it_alone(
    name: str, error: type[AceError], originals: Path, plan: Path
) -> None:
    """Output to the bit as before, and no hook or child left."""
    model, ids = load_model(originals / name, "cpu"), torch.arange(12)[None]
    before, modules = model(ids).logits, [n for n, _ in model.named_modules()]
    with pytest.raises(error):
        ACE.load(plan, 0.5).attach(model)
    assert torch.equal(model(ids).logits, before)
    assert [n for n, _ in model.named_modules()] == modules
    assert not model._forward_pre_hooks


def test_tables_are_not_added_to_a_plan_of_another_model(originals: Path, plan: Path, refuse: Refuse) -> None:
    """Also where the plan has them all, so that nothing would be computed."""
    for name, said in (("other", "other router weights"), ("dense", "dense model has nothing to skip")):
        refuse("plan", originals / name, "--tables", "-o", plan, says=(said,))
