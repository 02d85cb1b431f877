"""Requests with budgets of their own in one engine: each as if it had the engine to itself; nothing cached is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving_cases import run_engine

from ace_moe.checkpoint.loading import load_tokenizer
from ace_moe.demo import MODEL, TEXT

BUDGETS = (0.2, 0.5, 0.6)
NEW, SLOTS = 12, 8 * 6


def starts() -> list[list[int]]:
    """Two prompts a budget, of different lengths, longer than two blocks of the cache."""
    ids = load_tokenizer(MODEL)(TEXT.read_text(encoding="utf-8")[:9000])["input_ids"]
    return [ids[110 * n : 110 * n + 70 + 5 * n] for n in range(2 * len(BUDGETS))]


@pytest.fixture(scope="module")
def found(mapped: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each budget alone; all together; one prompt again at its own budget, at another, and after a change of the default."""
    alone = [{"skip": b, "only": [2 * n, 2 * n + 1]} for n, b in enumerate(BUDGETS)]
    mixed = {"skip": 0.0, "extra": [{"ace_skip": BUDGETS[n // 2]} for n in range(6)]}
    again = [{"only": [0], "extra": [{"ace_skip": b}]} for b in (0.2, 0.5)]
    default = [{"only": [0]}, {"only": [0]}, {"skip": 0.6, "only": [0]}, {"only": [0]}]
    task = {"prompts": starts(), "max_tokens": NEW, "logprobs": None}
    llm = {"enforce_eager": True, "enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 8}
    folder, ace = tmp_path_factory.mktemp("requests"), {"plan": str(mapped)}
    return run_engine(folder, MODEL, ace, [*alone, mixed, *again, *default], task, **llm)["steps"]


@pytest.mark.vllm
def test_each_request_runs_under_its_own_budget(found: list[dict[str, Any]]) -> None:
    alone, mixed = found[:3], found[3]
    assert mixed["tokens"] == [tokens for step in alone for tokens in step["tokens"]]
    for budget, step in zip(BUDGETS, alone, strict=True):
        ours = mixed["report"]["requests"][f"{budget:.2f}"]
        for phase in ("prefill", "decode"):
            assert ours[phase] == step["report"][phase], (budget, phase)
    total = sum(r["decode"]["routed"] for r in mixed["report"]["requests"].values())
    assert mixed["report"]["decode"]["routed"] == total == 6 * (NEW - 1) * SLOTS


@pytest.mark.vllm
def test_nothing_cached_under_another_budget_is_read(found: list[dict[str, Any]]) -> None:
    assert found[3]["cached"] == [0] * 6, "cached by the engine's own budgets before"
    same, other, default, default_again, changed, changed_again = found[4:]
    assert same["cached"][0] >= 64 and other["cached"] == [0]
    assert default["cached"] == [0] and default_again["cached"][0] >= 64
    assert changed["cached"] == [0] and changed_again["cached"][0] >= 64


@pytest.mark.vllm
def test_restored_slots_and_tracked_thresholds(mapped: Path, tmp_path: Path) -> None:
    """On as a server has it; the rule still skips what was asked for."""
    ace = {"plan": str(mapped), "skip": {"prefill": 0.0, "decode": 0.6}, "restore": True, "track": True}
    task = {"prompts": starts(), "max_tokens": 60, "logprobs": None}
    steps = run_engine(tmp_path, MODEL, ace, [{}, {}], task, enforce_eager=True, max_num_seqs=8)["steps"]
    report = steps[1]["report"]
    assert report["restore"] and report["decode"]["restored"] > 0 and report["prefill"]["restored"] == 0
    assert report["decode"]["skipped"] == pytest.approx(0.6, abs=0.03)
    assert 0 < report["reads"]["generated"]["ratio"] < 1
