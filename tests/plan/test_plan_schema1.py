"""Plans of schema 1 load for ever: three files written by the release that had it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_cases import KEPT
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.checkpoint import MoEModel
from ace_moe.demo import MODEL
from ace_moe.plan import Plan, Routers
from ace_moe.policies import Ace, make
from ace_moe.policies.forms import Fixed

FILES = sorted(KEPT.glob("schema1-*.safetensors"))


def test_the_three_are_there() -> None:
    assert [path.stem for path in FILES] == ["schema1-calibrated", "schema1-plain", "schema1-undefined"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_saved_again_it_is_the_same_plan(path: Path, tmp_path: Path) -> None:
    """As schema 2, with nothing lost."""
    plan = Plan.load(path)
    again = plan.save(tmp_path / path.name)
    assert b'{\\"schema\\": 2,' in again.read_bytes()
    assert Plan.load(again) == plan


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
    assert plan.threshold(Ace().settings, 0.5) == (0.11864566802978516, None)
    assert plan.thresholds[1].params == {"denominator": 0}
    for params in ({"denominator": 0}, {}):
        assert plan.threshold({**Fixed().settings, "params": params}, 0.5) == (0.5625, None)


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
