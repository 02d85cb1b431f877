"""The commands on quantised checkpoints as a user gives them: tables, inspect, budget and run with --expand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantised import quantise

from ace_moe.errors import PlanError
from ace_moe.plan import Plan
from ace_moe.tables.copies import compared
from bad_input.bad_input_cases import save_tokenizer
from command import run_ace

LIKE = {"deepseek_v3": "fp8 block", "qwen3_moe": "nvfp4", "glm4_moe": "int4 with zero points"}


@pytest.mark.parametrize("family", ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.slow) for f in list(LIKE)[1:])])
def test_from_tables_to_text(family: str, tmp_path: Path) -> None:
    packed, _ = quantise(tmp_path, family, lambda key, number: LIKE[family])
    save_tokenizer(packed)
    plan, text = tmp_path / "plan.safetensors", tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter, not all those who wander are lost. " * 20)
    assert run_ace("tables", packed, "-o", plan).code == 0
    sizes = ("--window", 32, "--tokens", 256, "--budgets", "0.3")
    done = run_ace("budget", packed, "--plan", plan, "--text", text, *sizes, "--expand", "--json")
    assert done.json["thresholds"][0]["budget"] == 0.3
    done = run_ace(
        "run", packed, "--plan", plan, "--skip", 0.3, "--prompt", "gold", "--max-new-tokens", 4, "--expand", "--json"
    )
    assert done.json["requested"] == 0.3 and 0 < done.json["realised"] < 1


def test_inspect_tells_how_a_copy_is_stored_and_how_far_it_is(tmp_path: Path) -> None:
    packed, plain = quantise(tmp_path, "qwen3_moe", lambda key, number: "nvfp4")
    found = run_ace("inspect", packed, "--json").json
    assert set(map(tuple, found["formats"].values())) == {("nvfp4",)}
    assert found["runs"].startswith("with --expand") and found["outliers"] == {}
    assert "stored as: nvfp4 (all layers)" in run_ace("inspect", packed).out
    pair = run_ace("inspect", packed, plain, "--json").json
    assert pair["same_routers"] and all(t["worst"] < 1e-5 for layer in pair["layers"].values() for t in layer.values())
    pair = run_ace("inspect", packed, tmp_path / "original", "--json").json
    assert pair["same_routers"] and pair["experts"] and any(t["worst"] > 0.01 for t in pair["layers"]["0"].values())
    shown = " ".join(run_ace("inspect", packed, tmp_path / "original").out.split())
    assert "the same, so one plan serves both" in shown


def test_models_of_two_kinds_are_not_compared(demo_plan: Plan, tmp_path: Path) -> None:
    packed, _ = quantise(tmp_path, "qwen3_moe", lambda key, number: "int8")
    made = json.loads((packed / "config.json").read_text())
    assert made["num_hidden_layers"] == 2
    from ace_moe import build_plan

    with pytest.raises(PlanError, match="not one architecture"):
        compared(demo_plan, build_plan(packed))
