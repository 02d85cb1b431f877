"""What methods of the lab gather for themselves in an attached model: router logits, output norms, sequences."""

import copy
import gc
import weakref

import pytest
import torch
from policy_cases import NAMES

import zoo
from ace_moe import ACE
from ace_moe.lab.policies import LAB_POLICIES
from ace_moe.policies import POLICIES, find, lab, make
from command import run_ace

GATHER = ["score", "halving", "pesf", "oracle", "xshare", "diep"]


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_the_lab_is_declared_and_nothing_of_it_is_built_in():
    assert lab() is LAB_POLICIES and not set(POLICIES) & set(LAB_POLICIES)
    assert all(make(name).key == name and find(name).name == name for name in NAMES)
    assert all(make(name).by_token for name in POLICIES)
    assert not any(make(name).by_token for name in GATHER)


@pytest.mark.parametrize("name", GATHER)
def test_detaching_takes_their_hooks_out(name, demo_model, ready_plan):
    before = hooks(demo_model)
    with ACE(ready_plan, policy=name)(demo_model) as ace:
        ace.set_threshold(0.3)
        zoo.run(demo_model, input_ids=torch.arange(24).view(2, 12))
    assert hooks(demo_model) == before


def test_a_sequence_is_counted_by_itself(fp32, ready_plan):
    """PESF knows where sequences of a batch end: as many slots are skipped as in each alone."""
    ids = torch.arange(1, 97).view(2, 48)
    kept = []
    with ACE(ready_plan, policy="pesf", dispatch="torch", allow_other_weights=True)(fp32) as ace:
        ace.set_threshold(0.3)
        for rows in ((ids,), ids.split(1)):
            ace.reset()
            for row in rows:
                zoo.run(fp32, input_ids=row)
            kept.append(ace.report()["prefill"]["kept"])
        assert 0 < ace.realised < 0.5
    assert kept[0] == kept[1]


def test_a_copy_and_a_dropped_model_keep_nothing(demo_model, ready_plan):
    model = copy.deepcopy(demo_model)
    ace = ACE(ready_plan, policy="score")
    ace.attach(model)
    zoo.run(model, input_ids=torch.arange(12)[None])
    other, gone = copy.deepcopy(model), weakref.ref(model)
    assert torch.equal(
        zoo.run(other, input_ids=torch.arange(12)[None]), zoo.run(demo_model, input_ids=torch.arange(12)[None])
    )
    del model
    gc.collect()
    assert gone() is None


def test_the_command_shows_seven_and_all():
    assert len(run_ace("policies", "--json").json) == 7
    assert set(run_ace("policies", "--all", "--json").json) == set(NAMES)
