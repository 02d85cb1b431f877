"""Training with a plan attached and layers that run again: gradients and counts are those without gradient checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint.loading import load_model
from ace_moe.demo import MODEL
from ace_moe.plan import Plan

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu").float().train()


def batch(seed: int, tokens: int, padded: int) -> dict[str, torch.Tensor]:
    """Two sequences, of which the second is padded on the right."""
    ids = torch.randint(5, 4000, (2, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, tokens - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


FIRST, SECOND = batch(0, 9, 4), batch(1, 12, 7)


def two_losses(model: Any, ace: ACE) -> None:
    (model(**FIRST).loss + model(**SECOND).loss).backward()


def evaluated_between(model: Any, ace: ACE) -> None:
    loss = model(**FIRST).loss
    with torch.no_grad():
        model(**FIRST)
    loss.backward()


def generated_between(model: Any, ace: ACE) -> None:
    loss = model(**FIRST).loss
    model.eval()
    model.generate(SECOND["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()
    loss.backward()


def another_budget_between(model: Any, ace: ACE) -> None:
    loss = model(**FIRST).loss
    ace.set_threshold(0.02)
    loss.backward()


def one_loss(model: Any, ace: ACE) -> None:
    model(**FIRST).loss.backward()


STEPS = [two_losses, evaluated_between, generated_between, another_budget_between]


def trained(model: PreTrainedModel, ace: ACE, step: Callable[[Any, ACE], None]) -> tuple[dict[str, Any], Any]:
    model.zero_grad()
    with ace(model):
        if ace.control == "fixed":
            ace.set_threshold(0.11)
        step(model, ace)
        report = ace.report()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, report["prefill"]


def check(
    model: PreTrainedModel, plan: Plan, step: Callable[[Any, ACE], None], reentrant: bool, **options: Any
) -> None:
    expected, counts = trained(model, ACE(plan, **options), step)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    try:
        found, again = trained(model, ACE(plan, **options), step)
    finally:
        model.gradient_checkpointing_disable()
    assert counts == again
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_passes_between_a_pass_and_its_backward(
    model: PreTrainedModel, demo_plan: Plan, step: Callable[[Any, ACE], None], reentrant: bool
) -> None:
    """The layers of each pass run again by its own rows and thresholds, not by the latest pass's."""
    check(model, demo_plan, step, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_thresholds_that_move(model: PreTrainedModel, demo_plan: Plan, reentrant: bool) -> None:
    """They move behind the forward pass; what runs again is decided by those of its time."""
    check(model, demo_plan, one_loss, reentrant, skip=0.5, control="track")


def test_nothing_is_left_on_layers(model: PreTrainedModel, demo_plan: Plan) -> None:
    """Also not on a copy that is made while hooks are there."""
    with ACE(demo_plan)(model) as ace:
        one_loss(model, ace)
        copied = copy.deepcopy(model)
    layer = model.model.layers[0]
    assert not layer._forward_hooks and not layer._forward_pre_hooks and "_ace_again" not in vars(layer)
    assert copied(**FIRST).loss == model(**FIRST).loss
