"""Ways out: a plan leaves a model through whatever is at hand, and takes nothing along that is not its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import ace_moe
import zoo
from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float()


@pytest.fixture(scope="module")
def stock(model: PreTrainedModel) -> torch.Tensor:
    return zoo.run(model)


def on(plan: Plan, model: PreTrainedModel) -> None:
    ace = ACE(plan)
    ace.attach(model)
    ace.set_threshold(0.13)


@pytest.mark.parametrize("held", [lambda m: m, lambda m: m.model], ids=["model", "part"])
@pytest.mark.parametrize("given", [lambda m: m, lambda m: m.model], ids=["model", "part"])
def test_detach_as_the_refusal_says(
    model: PreTrainedModel, demo_plan: Plan, stock: torch.Tensor, held: Any, given: Any
) -> None:
    """Whichever of the model and the stack inside it the plan was attached to, and whichever is at hand."""
    on(demo_plan, held(model))
    with pytest.raises(IntegrationError, match=r"ace_moe\.detach\(model\)"):
        ACE(demo_plan).attach(given(model))
    ace_moe.detach(given(model))
    assert torch.equal(zoo.run(model), stock)
    with ACE(demo_plan)(given(model)):
        pass


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_detach_from_a_wrapper(model: PreTrainedModel, demo_plan: Plan, stock: torch.Tensor, wrap: Any) -> None:
    on(demo_plan, model)
    ace_moe.detach(wrap(model))
    assert torch.equal(zoo.run(model), stock)


def test_detach_from_a_model_compiled_in_place(demo_plan: Plan) -> None:
    model = load_model(MODEL, device="cpu").float()
    before = zoo.run(model)
    on(demo_plan, model)
    model.compile(backend="eager")
    zoo.run(model)
    ace_moe.detach(model)
    assert torch.equal(zoo.run(model), before)


def test_a_users_generate_stays(model: PreTrainedModel, demo_plan: Plan) -> None:
    """One that was put on the model while a plan was attached is not ours to take away."""

    def mine(*given: Any, **options: Any) -> Any:
        return type(model).generate(model, *given, **options)

    with ACE(demo_plan)(model):
        model.generate = mine
    try:
        assert model.generate is mine
    finally:
        vars(model).pop("generate", None)
