"""What the engine refuses to start with, and in what words. Every refusal is an error of ours that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import Case, run_script

from ace_moe.plan import Fingerprint, Plan, Routers


def damaged(case: Case, folder: Path) -> dict[str, Path]:
    """Plans that are wrong in different ways."""
    plan = Plan.load(case.plan)
    other = Plan(plan.tables, replace(plan.fingerprint, routers=Routers("0" * 64)), "other")
    structure = {key: {**layer, "experts": 16} for key, layer in plan.fingerprint.structure.items()}
    tables = {key: {n: torch.ones(16) for n in ("gsp", "rcr")} for key in structure}
    foreign = Plan(tables, Fingerprint(structure, plan.fingerprint.routers), "foreign")
    fewer = {key: layer for key, layer in plan.fingerprint.structure.items() if key != "3"}
    short = Plan({k: plan.tables[k] for k in fewer}, Fingerprint(fewer, plan.fingerprint.routers), "short")
    (folder / "truncated").write_bytes(case.plan.read_bytes()[:-100])
    made = {name: p.save(folder / name) for name, p in (("other", other), ("foreign", foreign), ("short", short))}
    return {**made, "truncated": folder / "truncated"}


@pytest.mark.vllm
def test_engine_says_why_it_does_not_start(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of("demo")
    bad = damaged(case, tmp_path)
    good: dict[str, Any] = {"plan": str(case.plan)}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"plan": str(tmp_path / "none")}, {}, "PlanError: There is no plan at"),
        ({"plan": str(bad["truncated"])}, {}, "damaged, truncated or edited"),
        ({"plan": str(bad["foreign"])}, {}, "PlanError: The plan is of another model"),
        ({"plan": str(bad["short"]), "allow_other_weights": True}, {}, "PlanError: The plan has no layer 3"),
        ({"plan": str(bad["other"])}, {}, "same shape but other router weights"),
        ({**good, "skip": 0.5}, {}, "BudgetError: The plan has no threshold for a budget of 50.0%"),
        ({**good, "skip": 0.99}, {}, "BudgetError: A budget of 99.0% cannot be met"),
        ({**good, "gian": "kept"}, {}, "PolicyError: Policy 'share' has no setting gian"),
        ({**good, "policy": "oea"}, {}, "PolicyError: Policy 'oea' cannot be served"),
        ({**good, "kernels": "fast"}, {}, "OptionError: `kernels` is"),
        ({**good, "kernels": True}, {}, "IntegrationError: Our kernels cannot run"),
        ({**good, "executor": "fast"}, {}, "OptionError: `executor` is one of"),
        ({**good, "executor": "native"}, {}, "IntegrationError: native cannot run"),
        ("plan.safetensors", {}, "OptionError: The `ace` part of additional_config"),  # type: ignore[list-item]
        (good, {"llm": {"enable_lora": True}}, "IntegrationError: ACE does not work with --enable-lora"),
        (
            good,
            {"patch": "monolithic"},
            "IntegrationError: model.layers.0.mlp.experts: vLLM chose a kernel that routes",
        ),
    ]
    spec = [{"model": str(case.model), "ace": ace, **more} for ace, more, _ in cases]
    messages = attempts(tmp_path, [*spec, {"model": str(case.model), "ace": good}])
    assert messages.pop() == ""  # the good plan starts, in the same process, after all these
    for (_, _, expected), message in zip(cases, messages, strict=True):
        assert expected in message, message


def attempts(folder: Path, spec: list[dict[str, Any]]) -> list[str]:
    (folder / "spec.json").write_text(json.dumps(spec))
    done = run_script("serving_refusals.py", folder / "spec.json", folder / "said.json", timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "said.json").read_text())
