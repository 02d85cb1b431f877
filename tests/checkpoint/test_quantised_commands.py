"""The commands on quantised checkpoints as a user gives them: plan, inspect, budget and run with --expand."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from layouts import gpt_oss, kimi
from quantised import quantise

from ace_moe.demo import MODEL
from ace_moe.plan import Plan
from bad_input.bad_input_cases import save_tokenizer
from command import run_ace

LIKE: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "DeepSeek": lambda tmp: quantise(tmp, "deepseek_v3", lambda key, number: "fp8 block"),
    "Kimi": kimi,
    "gpt-oss": gpt_oss,
    "NVFP4": lambda tmp: quantise(tmp, "qwen3_moe", lambda key, number: "nvfp4"),
    "int4": lambda tmp: quantise(tmp, "glm4_moe", lambda key, number: "int4 with zero points"),
}


def with_text(tmp: Path, name: str) -> tuple[Path, Path]:
    """The checkpoint with a tokenizer, and a text."""
    packed, text = LIKE[name](tmp)[0], tmp / "text.txt"
    save_tokenizer(packed)
    text.write_text("All that is gold does not glitter, not all those who wander are lost. " * 20)
    return packed, text


@pytest.mark.parametrize(
    "name", ["DeepSeek", "gpt-oss", "Kimi", *(pytest.param(f, marks=pytest.mark.slow) for f in ("NVFP4", "int4"))]
)
def test_from_tables_to_text(name: str, tmp_path: Path) -> None:
    (packed, text), plan = with_text(tmp_path, name), tmp_path / "plan.safetensors"
    assert run_ace("plan", packed, "--tables", "-o", plan).code == 0
    sizes = ("--window", 32, "--tokens", 256, "--budgets", "0.3")
    done = run_ace("plan", packed, "--plan", plan, "--text", text, *sizes, "--expand", "--json")
    assert done.json["thresholds"][0]["budget"] == 0.3
    done = run_ace(
        "run", packed, "--plan", plan, "--skip", 0.3, "--prompt", "gold", "--max-new-tokens", 4, "--expand", "--json"
    )
    assert done.json["requested"] == 0.3 and 0 < done.json["realised"] < 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (ace-moe[eval])")
@pytest.mark.parametrize("name", ["Kimi", "gpt-oss"])
def test_tasks_on_an_expanded_model(name: str, tmp_path: Path) -> None:
    (packed, text), plan = with_text(tmp_path, name), tmp_path / "plan.safetensors"
    assert run_ace("plan", packed, "--tables", "-o", plan).code == 0
    sizes = ("--window", 32, "--tokens", 256, "--budgets", "0.3", "--no-fidelity")
    assert run_ace("plan", packed, "--plan", plan, "--text", text, *sizes, "--expand").code == 0
    rows = [{"query": "Is it gold?", "choices": ["yes", "no"], "gold": n % 2} for n in range(4)]
    (tmp_path / "arc_easy.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = (
        "--tasks",
        "arc_easy",
        "--data",
        tmp_path,
        "--skip",
        "0,0.3",
        "-o",
        tmp_path / "eval.json",
        "--device",
        "cpu",
    )
    cells = run_ace("eval", packed, "--plan", plan, *given, "--expand", "--json").json["cells"]
    assert cells[0]["realised"] == 0 and 0 < cells[1]["realised"] < 1


def test_evalscope_does_not_expand(tmp_path: Path, demo_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ace_moe.cli.tasks.check_harness", lambda name: None)
    plan = demo_plan.save(tmp_path / "plan.safetensors")
    done = run_ace(
        "eval", MODEL, "-p", plan, "--tasks", "piqa", "--harness", "evalscope", "--expand", "-o", tmp_path / "e"
    )
    assert done.code == 1 and "--harness lm-eval" in done.err


def test_inspect_tells_how_a_copy_is_stored(tmp_path: Path) -> None:
    packed, _ = quantise(tmp_path, "qwen3_moe", lambda key, number: "nvfp4")
    facts = run_ace("inspect", packed, "--json").json
    assert set(map(tuple, facts["formats"].values())) == {("nvfp4",)}
    assert facts["runs"].startswith("with --expand") and facts["outliers"] == {}
    assert "stored as: nvfp4 (all layers)" in run_ace("inspect", packed).out
