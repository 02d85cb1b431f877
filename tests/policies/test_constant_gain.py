"""A gain that is a number, of the model or of each layer."""

import pytest
import torch

import zoo
from ace_moe import ACE, build_plan, rule
from ace_moe.errors import PlanError, PolicyError
from ace_moe.policies import make


def test_a_number_is_its_shortest_text():
    assert make("share", gain=1.05) == make("share:gain=1.05") == make("share", gain="1.050")
    assert make("share", gain=1.05).settings["gain"] == "1.05"
    assert make("share", gain="gain_x").tables == ("gain_x",)


@pytest.mark.parametrize("gain", ["loud", 0, -1, 5, float("nan"), True, None, "", "1,05"])
def test_what_is_no_gain_is_refused(gain):
    with pytest.raises(PolicyError, match="gain must be one of"):
        make("share", gain=gain)


def test_tokens_that_lost_a_slot_are_multiplied():
    gates, keep = torch.tensor([[0.5, 0.25], [0.5, 0.25]]), torch.tensor([[True, False], [True, True]])
    for found in (rule.rescale(gates, keep, "0.9"), rule.rescale(gates, keep, "gain_x", torch.tensor(0.9))):
        torch.testing.assert_close(found, torch.tensor([[0.45, 0.0], [0.5, 0.25]]))


def logits(model, plan, tau=0.4, **options):
    ace = ACE(plan, policy="share", dispatch="torch", **options)
    with ace(model), torch.no_grad():
        ace.set_threshold(tau)
        return model(**zoo.inputs(batch=1, tokens=6)).logits


def test_each_layer_has_its_own():
    """A table of ones is no gain at all; with equal numbers it is the number; nothing changes where nothing is skipped."""
    model = zoo.build("qwen3_moe", num_hidden_layers=2)
    plan = build_plan(model)
    table = {c: plan.with_tables({key: {"gain_x": torch.tensor(c)} for key in plan.tables}) for c in (1.0, 1.25)}
    assert torch.equal(logits(model, table[1.0], gain="gain_x"), logits(model, plan, gain="none"))
    assert torch.equal(logits(model, table[1.25], gain="gain_x"), logits(model, plan, gain=1.25))
    assert not torch.equal(logits(model, plan, gain=1.25), logits(model, plan, gain="none"))
    assert torch.equal(logits(model, plan, 0.0, gain=1.25), logits(model, plan, 0.0, gain="none"))
    mixed = plan.with_tables({key: {"gain_x": torch.tensor(1.0 + 0.25 * int(key))} for key in plan.tables})
    assert not torch.equal(logits(model, mixed, gain="gain_x"), logits(model, table[1.25], gain="gain_x"))


def test_a_table_that_is_not_there_is_named():
    model = zoo.build("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(PlanError, match="gain_x"):
        ACE(build_plan(model), policy="share", gain="gain_x")
