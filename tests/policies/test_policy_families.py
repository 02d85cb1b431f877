"""Policies inside models of other router kinds: identity at knob 0, and every policy runs."""

import pytest
import torch
from policy_cases import NAMES

import zoo
from ace_moe import ACE, build_plan
from ace_moe.errors import IntegrationError, StructureError
from ace_moe.lab.policies import calibrate, prepare
from ace_moe.lab.policies.calls import router_logits, watch
from ace_moe.lab.policies.scores import scores
from ace_moe.plan import Workload
from ace_moe.policies import make
from ace_moe.text import Windows

# softmax normalised; sigmoid with bias and groups; softmax not normalised; softmax of the top-k, biased experts; its own
# probabilities and another input than the experts'; square root of softplus
FAMILIES = [f for f in ("qwen3_moe", "deepseek_v3", "deepseek_v2", "gpt_oss", "gemma4", "deepseek_v4") if zoo.has(f)]
QUICK = {"diep": {"epochs": 1}, "expert_sparsity": {"enumerate": 20}, "lexi": {"samples": 32}}
EXPENSIVE = {"alloc_l"}  # as many passes as slots; the same rule as lexi


@pytest.fixture(scope="module", params=FAMILIES)
def ready(request):
    """A tiny model with a plan that holds what every policy needs; what has no meaning for the family is left out."""
    model = zoo.build(request.param)
    windows = Windows(zoo.inputs(2, 16)["input_ids"], Workload("noise", "0" * 64, 32))
    plan, usable = build_plan(model), []
    for name in (n for n in NAMES if n not in EXPENSIVE):
        policy = make(name, **QUICK.get(name, {}))
        try:
            plan = prepare(plan, policy, model, windows)
        except StructureError:
            continue
        if not set(policy.needs) & set(plan.undefined):
            usable.append(name)
    return model, plan, usable


def test_knob_zero_changes_no_bit(ready):
    model, plan, usable = ready
    model.set_experts_implementation("grouped_mm")
    given = zoo.inputs(2, 16)
    stock = zoo.run(model, **given)
    assert len(usable) >= len(NAMES) - 4, usable
    for name in usable:
        with ACE(plan, policy=name)(model) as ace:
            assert torch.equal(zoo.run(model, **given), stock), name
            assert ace.realised == 0


@pytest.mark.long
def test_every_policy_runs(ready):
    """Finite output that is not the stock one, and a ratio under its bound."""
    model, plan, usable = ready
    given = zoo.inputs(2, 16)
    stock = zoo.run(model, **given)
    for name in usable:
        with ACE(plan, policy=name)(model) as ace:
            ace.set_threshold(0.6)
            found = zoo.run(model, **given)
            assert found.isfinite().all(), name
            assert 0 <= ace.realised <= (1 if name == "modes:ace-paper" else 0.75), name
            if ace.realised > 0:
                assert not torch.equal(found, stock), name


def test_gates_are_a_multiple_of_the_scores(ready):
    """The function that `scores` finds is the router's: also for routers with bias, groups and scaling factors."""
    model, _, _ = ready
    for key, call in watch(model, zoo.inputs(2, 16)["input_ids"]).items():
        p = scores(call.logits, call.ids, call.gates).gather(-1, call.ids)
        ratio = call.gates.float() / p
        spread = (ratio / ratio.mean(-1, keepdim=True) - 1).abs().max()
        assert spread < (0.5 if "Gemma" in type(model).__name__ else 1e-3), key  # Gemma-4 scales gates by expert


def test_logits_are_found_wherever_the_router_returns_them():
    """Granite's router returns ids and gates first; Inkling's has rows for sinks behind the experts'."""
    logits, gates, ids = torch.randn(3, 10), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.long)
    assert torch.equal(router_logits((ids, gates, logits), 10), logits)
    assert torch.equal(router_logits((logits, gates, ids), 8), logits[:, :8])
    assert torch.equal(router_logits(logits.view(1, 3, 10), 10), logits)
    with pytest.raises(IntegrationError, match="no score for each of the 16 experts"):
        router_logits((ids, gates, logits), 16)
    found = watch(zoo.build("granitemoe"), zoo.inputs(1, 6)["input_ids"])
    assert all(call.logits.shape == (6, zoo.EXPERTS) for call in found.values())


@pytest.mark.parametrize("name", ["modes", "diep", "alloc_l"])
def test_a_model_without_a_head_is_refused(name):
    model = zoo.build("qwen3_vl_moe")
    windows = Windows(zoo.inputs(1, 8)["input_ids"], Workload("noise", "0" * 64, 8))
    with pytest.raises(IntegrationError, match="does not predict tokens"):
        calibrate(make(name), model, windows)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
