"""A budget for each sequence of a batch: each is decided and counted as if the whole batch had its budget."""

import pytest
import torch

from ace_moe import ACE
from ace_moe.errors import BudgetError, IntegrationError, PolicyError
from ace_moe.mapping import map_budgets
from ace_moe.policies import make

BUDGETS = [0.2, 0.5, {"prefill": 0.0, "decode": 0.5}]


@pytest.fixture(scope="module")
def plan(demo_model, demo_plan, demo_windows):
    return map_budgets(demo_model, demo_plan, make("share"), demo_windows, [0.2, 0.5]).plan


def answers(model, ids, **more):
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, **more)


def test_each_sequence_as_under_its_own_budget(demo_model, plan, demo_windows):
    ids = demo_windows.ids[:3, :20]
    with ACE(plan, policy="share", dispatch="torch")(demo_model) as ace:
        with ace.budgets(BUDGETS):
            mixed = answers(demo_model, ids)
        report = ace.report()
        assert list(report["requests"]) == ["0.20", "0.50", "0.00/0.50"] and report["decode"]["routed"] == 3 * 5 * 48
        for n, (budget, found) in enumerate(zip(BUDGETS, report["requests"].values(), strict=True)):
            ace.reset()
            ace.set_skip(budget)
            alone = answers(demo_model, ids[n : n + 1])
            assert torch.equal(alone[0], mixed[n])
            assert {p: found[p]["kept"] for p in ("prefill", "decode")} == {
                p: ace.report()[p]["kept"] for p in ("prefill", "decode")
            }


def test_beams_share_their_sequences_budget(demo_model, plan, demo_windows):
    with ACE(plan, policy="share")(demo_model) as ace, ace.budgets([0.0, 0.5]):
        answers(demo_model, demo_windows.ids[:2, :8], num_beams=2)
        found = ace.report()["requests"]
    assert found["0.00"]["decode"]["skipped"] == 0 < found["0.50"]["decode"]["skipped"]
    assert found["0.00"]["decode"]["routed"] == found["0.50"]["decode"]["routed"]


def test_what_does_not_fit_is_refused(demo_model, plan, demo_windows):
    ace = ACE(plan, policy="share")
    with pytest.raises(IntegrationError, match="attach"), ace.budgets([0.2]):
        pass
    with pytest.raises(PolicyError, match="one budget"), ACE(plan, policy="pesf").budgets([0.0]):
        pass
    with ace(demo_model):
        with pytest.raises(BudgetError, match="at most"), ace.budgets([0.95]):
            pass
        with pytest.raises(BudgetError, match="a budget for each"), ace.budgets([]):
            pass
        drafted = {"prefill": 0.2, "decode": 0.5, "verify": 0.0}
        with pytest.raises(BudgetError, match="go by decode"), ace.budgets([drafted]):
            pass
        with ace.budgets([0.2, 0.5]), pytest.raises(IntegrationError, match="2 sequences"):
            demo_model(demo_windows.ids[:3, :4])
        demo_model(demo_windows.ids[:3, :4])
        assert ace.report()["prefill"]["routed"] == 3 * 4 * 48
        with pytest.raises(BudgetError, match="room for 15"), ace.budgets([n / 100 for n in range(20, 40)]):
            pass
