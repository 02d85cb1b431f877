"""The plugin's settings: read from vLLM's arguments, batch sizes for our kernels, policies that cannot be served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ace_moe.budget import Budget
from ace_moe.demo import MODEL
from ace_moe.engines.vllm import engine_args
from ace_moe.engines.vllm.settings import EVERY, Settings, check_policy
from ace_moe.errors import OptionError, PlanError, PolicyError
from ace_moe.plan import Plan, Routers, Threshold, Workload
from ace_moe.plan.hub import FILE
from ace_moe.policies import make


def test_engine_args() -> None:
    skip = {"prefill": 0.5, "decode": 0.2}
    found = engine_args("plan.safetensors", skip, gain="none")
    ace = found["additional_config"]["ace"]
    assert ace["plan"].startswith("/") and ace["skip"] == skip and ace["gain"] == "none"
    settings = Settings.from_dict(ace)
    assert settings.policy_settings == {"gain": "none"} and settings.skip == Budget(0.5, 0.2, 0.2)


def test_a_plan_of_the_hub_is_fetched_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ace_moe.plan.hub.download", lambda name, revision: Path("/kept", name, FILE))
    assert engine_args("owner/name")["additional_config"]["ace"]["plan"] == f"/kept/owner/name/{FILE}"


@pytest.mark.parametrize("wrong", [{"allow_other_weights": "false"}, {"workload": 5}, {"kernels": -1}, {"track": 1}])
def test_what_is_of_another_kind_is_refused(wrong: dict[str, Any]) -> None:
    """`"false"` would be taken for true."""
    with pytest.raises(OptionError, match=f"`{next(iter(wrong))}` is"):
        Settings.from_dict(wrong)


def test_kernels_setting() -> None:
    assert Settings().kernel_tokens == Settings(kernels=True).kernel_tokens == EVERY
    assert Settings(kernels=False).kernel_tokens == 0
    assert [Settings(kernels=n).kernel_tokens for n in (1, 8)] == [1, 8]


def test_policies_that_decide_by_the_batch_are_refused() -> None:
    for name in ("ace", "gsp", "rcr", "share", "top_p", "aimer", "relative"):
        check_policy(make(name))
    for name in ("oea", "xshare", "pesf", "oracle"):
        with pytest.raises(PolicyError, match=f"{name}' cannot be served"):
            check_policy(make(name))


def test_the_newest_thresholds_that_can_be_served(demo_plan: Plan) -> None:
    """What was mapped for a comparison does not keep a server from starting."""
    rest = {"budget": 0.3, "threshold": 0.1, "realised": 0.3, "corrected": True, "passes": 1}
    text, names = Workload("a.txt", "0" * 64, 64), ("gsp", "pesf")
    entries = [Threshold(**make(name).settings, **rest, workload=text) for name in names]  # type: ignore[arg-type]
    plan = demo_plan.with_thresholds(entries)
    assert Settings().chosen(plan).key == "gsp"
    assert Settings().chosen(demo_plan.with_thresholds(entries[1:])) == make("share")


def test_tables_that_come_from_weights_are_added(demo_plan: Plan, tmp_path: Path) -> None:
    """A plan has those of the default policy; others are computed from the checkpoint when it is opened."""
    given = {"plan": str(demo_plan.save(tmp_path / "plan.safetensors")), "policy": "aimer"}
    plan, policy = Settings.from_dict(given).open(MODEL)
    assert policy.tables == ("aimer",) and not plan.lacks(["aimer", "gsp", "rcr"])
    assert Plan.load(tmp_path / "plan.safetensors").lacks(["aimer"])  # the file is left alone
    other = Plan(demo_plan.tables, replace(demo_plan.fingerprint, routers=Routers("0" * 64)), "other")
    given["plan"] = str(other.save(tmp_path / "other.safetensors"))
    with pytest.raises(PlanError, match="other router weights"):
        Settings.from_dict(given).open(MODEL)
    plan, _ = Settings.from_dict({**given, "allow_other_weights": True}).open(MODEL)
    assert not plan.lacks(["aimer"])
    with pytest.raises(PlanError, match="modes"):
        Settings.from_dict({**given, "policy": "modes"}).open(MODEL)


def test_a_denominator_needs_scores_that_a_server_does_not_hand_over() -> None:
    check_policy(make("share"))
    with pytest.raises(PolicyError, match="router logits"):
        check_policy(make("halving", denominator=16))
