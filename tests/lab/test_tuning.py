"""`ace tune` as a user runs it, stopped and started again; what it compares, and what `auto` makes of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from ace_moe import ACE, build_plan
from ace_moe.demo import MODEL, TEXT
from ace_moe.errors import PlanError, TextError
from ace_moe.lab.policies.calls import answers, watch
from ace_moe.lab.tune import factors, trials, tune
from ace_moe.lab.tune.evidence import TextPart, log_kl
from ace_moe.lab.tune.tuning import identity
from ace_moe.mapping.passes import observe
from ace_moe.plan import Plan, Threshold, Workload
from ace_moe.policies import PRESETS, make, policy_for
from ace_moe.text import windows_of
from command import run_ace

pytestmark = pytest.mark.long

OPTIONS = ("--tokens", 256, "--window", 64, "--budgets", 0.5, "--device", "cpu", "--json")
STOPPED = 25


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that ends in the middle, as by a kill, and one that goes on: the plan, its report, the rows each measured."""
    path = build_plan(MODEL).save(tmp_path_factory.mktemp("tune") / "plan.safetensors")
    rows: list[int] = []
    stock = trials.predict  # once for each window, at the one budget

    def counted(model: Any, ids: Any) -> Any:
        rows.append(len(rows))
        if len(rows) == STOPPED + 1:
            raise KeyboardInterrupt
        return stock(model, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "predict", counted)
        assert run_ace("tune", MODEL, "-p", path, "--text", TEXT, *OPTIONS).code == 130
        kept = json.loads(path.with_name(".plan.safetensors.tune").read_text())
        said = run_ace("tune", MODEL, "-p", path, "--text", TEXT, *OPTIONS).json
    return {"path": path, "said": said, "kept": kept, "rows": rows}


def test_a_search_goes_on_with_the_windows_it_had(demo_model: Any, demo_plan: Plan, demo_windows: Any) -> None:
    """The same tokens in shorter windows are another search: losses are added up by window."""
    cut = windows_of(demo_windows.ids.view(-1, 128), demo_windows.workload.name)
    one, other = (identity(demo_model, demo_plan, w, [0.5]) for w in (demo_windows, cut))
    assert cut.workload == demo_windows.workload and one != other


def test_a_stopped_search_loses_nothing(ran: dict[str, Any]) -> None:
    """No window is read twice under one candidate, and nothing is left beside the plan."""
    assert sum(map(len, ran["kept"]["rows"].values())) == STOPPED
    held_out = 1
    chosen_on = sum(row["windows"] for row in ran["said"]["tried"])
    again = len(ran["rows"]) - 1 - chosen_on  # one was under way; finalists read the held-out window too
    assert 0 < again <= 7 * held_out
    assert [p.name for p in ran["path"].parent.iterdir()] == ["plan.safetensors"]


def test_the_recommendation_is_what_auto_runs(ran: dict[str, Any]) -> None:
    from ace_moe.engines.vllm.settings import Settings

    plan = Plan.load(ran["path"])
    found = plan.recommendation
    assert found is not None and found["settings"] == ran["said"]["settings"] and found["budgets"] == [0.5]
    ace = ACE.load(ran["path"], 0.5)  # no text and no mapping: its threshold is there
    assert ace.policy.settings == found["settings"] and float(ace.thresholds[1]) > 0
    entry = next(t for t in plan.thresholds if t.fits(found["settings"]))
    assert abs(entry.realised - 0.5) < 0.01 and entry.fidelity is not None
    served = Settings.from_dict({"plan": str(ran["path"]), "skip": 0.5}).open(MODEL)[1]
    assert served.settings == found["settings"]
    assert plan.made[-1]["inputs"].keys() == {TEXT.name}


def test_columns_are_the_budgets_in_the_order_they_were_measured_in(tmp_path: Path, ran: dict[str, Any]) -> None:
    """Not in the order they were typed in."""
    plan = build_plan(MODEL).save(tmp_path / "plan.safetensors")
    told = {**ran["said"], "budgets": [0.3, 0.5]}
    row = {"label": "share", "windows": 2, "kl": [0.0321, 0.0654], "perplexity_change": [0.01, 0.02]}
    found = SimpleNamespace(recommendation=told, tried=[row])
    options = ("--tokens", 256, "--window", 64, "--budgets", "0.5,0,0.3")
    with patch("ace_moe.lab.tune.tune", return_value=found):
        said = run_ace("tune", MODEL, "-p", plan, "--text", TEXT, *options).out
    heading = next(line for line in said.splitlines() if "candidate" in line and "windows" in line)
    assert re.findall(r"\d+%", heading) == ["30%", "50%"] and "--skip 0.3" in " ".join(said.split())


def test_what_is_chosen_is_no_worse_than_the_gate_share_where_it_was_not_chosen(ran: dict[str, Any]) -> None:
    evidence = ran["said"]["evidence"]
    kl = {name: evidence[name]["measured"][0]["kl"]["value"] for name in ("choice", "runner_up", "baseline")}
    assert 0 < kl["choice"] <= kl["baseline"] * 1.05  # at the ratio each realised
    assert evidence["held_out"] == {"windows": 1, "tokens": 63}
    assert evidence["choice"]["measured"][0]["kl"]["low"] is None, "one window gives no interval"
    assert evidence["candidates"] == len(ran["said"]["tried"]) > 30
    tried = {json.dumps(row["settings"], sort_keys=True) for row in ran["said"]["tried"]}
    assert len(tried) == len(ran["said"]["tried"])


def test_every_kind_of_change_is_tried(ran: dict[str, Any]) -> None:
    settings = [row["settings"] for row in ran["said"]["tried"]]
    assert {"none", "kept", "power", "0.95", "1.05"} <= {s["gain"] for s in settings}
    assert any(s["gain"].startswith("gain_fit_") for s in settings)
    kinds = {(s["factor"] or "none").split("_")[1 if s["factor"] else 0] for s in settings}
    assert kinds == {"none", "branch", "sensitivity", "first"}
    assert {s["min_active"] for s in settings} == {1, 2, 3}
    assert {"share", "top_p", "fixed", "gsp", "ace"} <= {s["policy"] for s in settings}


def test_a_text_too_short_to_hold_out_a_part(demo_model: Any, demo_plan: Plan, demo_windows: Any) -> None:
    short = windows_of(demo_windows.ids[:3], "short")
    with pytest.raises(TextError, match="at least 4 windows"):
        tune(demo_model, demo_plan, short, [0.5])
    with pytest.raises(TextError, match="budgets above 0"):
        tune(demo_model, demo_plan, demo_windows, [0.0])


# ---- what is compared -------------------------------------------------------------------------------------------


@given(st.floats(-9, -1), st.floats(1, 12), st.lists(st.floats(-0.02, 0.02), min_size=2, max_size=2))
def test_a_ratio_that_was_missed_neither_helps_nor_harms(level: float, slope: float, missed: list[float]) -> None:
    """A candidate whose log KL is a line in the ratio counts by its line, whatever it realised."""
    budgets = [0.4, 0.6]

    def rows(ratios: list[float]) -> list[list[list[float]]]:
        return [[[math.exp(level + slope * r), 0.0, 0.0, r] for r in ratios]]

    exact = log_kl(rows(budgets), budgets, TextPart(0, 1))
    moved = log_kl(rows([b + m for b, m in zip(budgets, missed, strict=True)]), budgets, TextPart(0, 1))
    assert moved == pytest.approx(exact, abs=1e-6) == pytest.approx(level + slope * 0.5, abs=1e-6)


# ---- layers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    return zoo.build("qwen3_moe", num_hidden_layers=3)


def test_a_silent_layer_has_the_least_factor(tiny: Any) -> None:
    plan, ids = build_plan(tiny), zoo.inputs(batch=1, tokens=24)["input_ids"]
    down = tiny.model.layers[1].mlp.experts.down_proj
    before = down.detach().clone()
    with torch.no_grad():
        down.mul_(1e-9)
    numbers = [factors.branch(tiny, ids), factors.sensitivity(tiny, plan, make("share"), ids, 0.4)]
    with torch.no_grad():
        down.copy_(before)
    for found in numbers:
        scaled = factors.as_factor(found)
        assert list(scaled) == list(plan.tables) and min(found, key=lambda key: found[key]) == "1"
        assert max(scaled.values()) == 1 and scaled["1"] == factors.SMALLEST
        plan.with_tables(
            {key: {"factor_x": torch.tensor(value)} for key, value in scaled.items()}
        )  # as plans take them


def test_the_gain_that_fits_is_the_least_squares_one(tiny: Any) -> None:
    plan, policy, ids = build_plan(tiny), make("share"), zoo.inputs(batch=1, tokens=24)["input_ids"]
    _, seen = observe(tiny, plan, {"": policy}, lambda: tiny(ids))
    tau = seen[""].threshold(0.4)
    found = factors.fitted_gains(tiny, plan, policy, [ids], tau)
    for key, call in watch(tiny, ids).items():
        outputs = answers(tiny.model.layers[int(key)].mlp.experts, call.hidden, call.ids)
        share = call.gates / call.gates.sum(-1, keepdim=True)
        keep = (share >= tau) | (share == share.max(-1, keepdim=True).values)
        lost = ~keep.all(-1)
        y, less = ((outputs * (call.gates * k).unsqueeze(-1)).sum(1)[lost] for k in (1, keep))
        best = torch.linalg.lstsq(less.reshape(-1, 1), y.reshape(-1, 1)).solution
        assert found[key] == pytest.approx(float(best.detach()), rel=1e-3)


# ---- auto -------------------------------------------------------------------------------------------------------


def entry(policy: str, text: str, **settings: Any) -> Threshold:
    made = make(policy, **settings)
    return Threshold(**made.settings, budget=0.5, threshold=0.1, realised=0.5, corrected=True, passes=1,
                     workload=Workload(text, text * 8, 8))  # fmt: skip


def test_auto_is_the_recommendation_else_the_newest_else_the_share(demo_plan: Plan) -> None:
    assert policy_for(demo_plan) == make("share", gain="power")
    mapped = demo_plan.with_thresholds([entry("gsp", "a"), entry("top_p", "b", squared=True, gain="power")])
    assert policy_for(mapped) == make("top_p", squared=True, gain="power")
    assert policy_for(mapped, workload="a") == make("gsp")
    told = replace(mapped, recommendation={"settings": make("fixed", gain="1.05", min_active=2).settings})
    assert policy_for(told) == make("fixed", gain=1.05, min_active=2)
    assert policy_for(told, gain="none") == make("fixed", gain="none", min_active=2)
    assert policy_for(told, "ace") == make("ace") and policy_for(told, preset="paper") == PRESETS["paper"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "os:path"}, "is not built in"),
        ({"policy": ["share"]}, "is not built in"),
        ({"policy": "share", "params": {"squares": 1}}, "has no setting squares"),
        ({"policy": "share", "params": {"compensate": "mean"}}, "has no setting compensate"),
        ({"policy": "share", "gain": "loud"}, "gain must be one of"),
        ({"policy": "share", "params": 3}, "cannot be used"),
        ({}, "is not built in"),
    ],
)
def test_a_recommendation_that_means_nothing_is_refused(demo_plan: Plan, settings: Any, says: str) -> None:
    """And a file never says which code is imported."""
    with pytest.raises(PlanError, match=says):
        policy_for(replace(demo_plan, recommendation={"settings": settings}))
