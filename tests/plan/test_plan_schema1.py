"""What plans of schema 1 mean: three files written by the release that had it."""

from __future__ import annotations

import pytest
from plan_cases import KEPT, found
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint import MoEModel
from ace_moe.demo import MODEL
from ace_moe.plan import Plan, Routers
from ace_moe.policies import Ace, make
from ace_moe.policies.forms import Fixed


def test_plain(demo_model: PreTrainedModel) -> None:
    """Content is the routers' exact hash, byte for byte; nothing is known of the rest."""
    plan = Plan.load(KEPT / "schema1-plain.safetensors")
    assert plan.fingerprint.routers == Routers(MoEModel.open(MODEL).content(), None)
    assert plan.fingerprint.experts == {}
    assert [t.factor for t in plan.thresholds] == [None, None]
    assert plan.check_model(MoEModel.of(demo_model).fingerprint()) is plan
    with ACE(plan, 0.5)(demo_model):
        pass


def test_plain_thresholds_are_found() -> None:
    plan = Plan.load(KEPT / "schema1-plain.safetensors")
    assert found(plan.lookup(Ace().settings, 0.5)) == (0.11864566802978516, None)
    assert plan.thresholds[1].params == {"denominator": 0}
    for params in ({"denominator": 0}, {}):
        assert found(plan.lookup({**Fixed().settings, "params": params}, 0.5)) == (0.5625, None)


def test_calibrated() -> None:
    plan = Plan.load(KEPT / "schema1-calibrated.safetensors")
    assert plan.calibrations["naee_median"]["workload"]["tokens"] == 1024
    assert plan.lacks(make("naee").needs) == []
    assert ACE(plan, 0.5, policy="naee").thresholds.tolist() == pytest.approx([0.3672208786] * 3)


def test_undefined() -> None:
    plan = Plan.load(KEPT / "schema1-undefined.safetensors")
    assert list(plan.tables) == ["1", "2", "10"]
    assert set(plan.tables["1"]) == {"gsp"}
    assert "does not see the experts' input" in plan.undefined["rcr"]
    assert plan.other_weights == ("d" * 64,)
