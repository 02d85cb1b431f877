"""A training step with a plan attached is refused by name; evaluation runs, whether torch records gradients or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.errors import IntegrationError
from ace_moe.plan import Plan

TAU = 0.11


@pytest.fixture
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float().train()


def loss(model: Any) -> torch.Tensor:
    ids = zoo.inputs()["input_ids"]
    return model(input_ids=ids, labels=ids).loss


def gradient(model: Any) -> torch.Tensor:
    model.zero_grad()
    loss(model).backward()
    return model.model.layers[2].mlp.experts.down_proj.grad.clone()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_is_refused(model: PreTrainedModel, demo_plan: Plan, checkpointing: bool) -> None:
    """With advice, and the next evaluation is counted as ever; after `detach` the model trains as before."""
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected = gradient(model)
    with ACE(demo_plan)(model) as ace:
        ace.set_threshold(TAU)
        with pytest.raises(IntegrationError, match=r"`ace\.detach\(\)`.*`model\.eval\(\)`"):
            gradient(model)
        assert ace.report()["prefill"]["routed"] == 0
        with torch.no_grad():
            loss(model)
        assert ace.report()["prefill"]["routed"] == zoo.inputs()["input_ids"].numel() * 8 * 6 and ace.realised > 0.1
    assert torch.equal(gradient(model), expected)


def test_a_compiled_training_step_is_refused(model: PreTrainedModel, demo_plan: Plan) -> None:
    torch._dynamo.reset()
    with ACE(demo_plan)(model), pytest.raises(IntegrationError, match="training mode"):
        loss(torch.compile(model, backend="eager"))


def test_evaluation_with_gradients_on(model: PreTrainedModel, demo_plan: Plan) -> None:
    """`model.eval()` without `torch.no_grad()`, and a frozen model in training mode: the same result, counted once."""
    with ACE(demo_plan, dispatch="torch")(model) as ace:
        ace.set_threshold(TAU)
        with torch.no_grad():
            expected = loss(model.eval())
        counts = ace.report()["prefill"]
        ace.reset()
        assert gradient(model).any(), "in torch an evaluated model has gradients"
        assert ace.report()["prefill"] == counts
        assert torch.equal(loss(model), expected)
        assert torch.equal(loss(model.train().requires_grad_(False)), expected)
