"""Experts in host memory: the same tokens, whichever have copies beside the GPU. Without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import zoo
from ace_moe import ACE, build_plan
from ace_moe.decoding import Decoder
from ace_moe.engines.transformers import host
from ace_moe.engines.transformers.experts import HOST
from ace_moe.engines.transformers.host import hosted, keep_near, place_experts, settle
from ace_moe.errors import IntegrationError, OptionError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def placed(resident: float, family: str = "qwen3_moe"):
    model = zoo.build(family)
    plan = build_plan(model)
    place_experts(model, DEVICE, resident)
    return model, ACE(plan, policy="share", dispatch="kernels")


@pytest.mark.parametrize("resident", [0.0, 0.5])
@pytest.mark.long
def test_the_same_answers_from_host_memory(resident):
    stock = zoo.build("qwen3_moe").to(DEVICE)
    given = {name: t.to(DEVICE) for name, t in zoo.inputs(1, 7).items()}
    model, ace = placed(resident)
    with torch.no_grad(), ace(model):
        ace.set_threshold(0.0)
        torch.testing.assert_close(model(**given).logits, stock(**given).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_busy_experts_move_in():
    """Counts of a text choose the copies, in the tensors a recorded graph reads; answers stay."""
    model, ace = placed(0.25)
    given = {name: t.to(DEVICE) for name, t in zoo.inputs(1, 6).items()}
    first = hosted(model)[0]
    near, used = vars(first)[HOST].near, torch.zeros(first.num_experts)
    used[[1, 3]] = 5
    with torch.no_grad(), ace(model):
        expected, where = model(**given).logits, near.row.data_ptr()
        keep_near(first, used)
        assert {1, 3} <= set((near.row >= 0).nonzero().flatten().tolist()) and near.row.data_ptr() == where
        torch.testing.assert_close(model(**given).logits, expected)
        ace.reset()
        settle(model, lambda: model(**given))
        assert ace.report()["prefill"]["routed"] == 0


def test_what_is_pinned_is_not_pinned_again(monkeypatch):
    """A second decoder of the same model: each copy would stay until the model is gone."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    weight = torch.randn(2, 3, 4)
    assert host._reachable(weight, torch.device("cuda"), torch.nn.Module()).data_ptr() == weight.data_ptr()


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="resident"):
        place_experts(zoo.build("qwen3_moe"), DEVICE, 1.0)
    model = zoo.build("qwen3_moe")
    with ACE(build_plan(model))(model), pytest.raises(IntegrationError, match="attached already"):
        place_experts(model, DEVICE)
    with pytest.raises(OptionError, match="host"):
        Decoder(model, 1, 8, experts="disk")  # type: ignore[arg-type]
    dense = torch.nn.Module()
    with pytest.raises(IntegrationError, match="no experts"):
        place_experts(dense, DEVICE)  # type: ignore[arg-type]
    model, _ = placed(0.0)
    decoder = Decoder(model, 1, 8, captured=False)
    with pytest.raises(IntegrationError, match="attach"):
        decoder.prefill(torch.ones(1, 3, dtype=torch.long, device=DEVICE))
