"""The reports of several ranks are added up to one, in which each token counts once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from serving_parts import FOUND, reply

from ace_moe.engines.vllm.control import AceWorker, together
from ace_moe.errors import IntegrationError


def test_ranks_that_see_the_same_tokens_count_once() -> None:
    same, parts = together([reply(0), reply(1)]), together([reply(0, split=True), reply(1, split=True)])
    ratios = {"restored": 0, "realised": 0.25, "skipped": 0.25}
    assert same["prefill"] == {"routed": 160, "kept": 120, **ratios}
    assert parts["prefill"] == {"routed": 320, "kept": 240, **ratios}
    assert together([reply(0), reply(1), reply(0, data=1), reply(1, data=1)])["prefill"]["routed"] == 320
    assert list(same["layers"]) == ["2", "10"] and same["layers"]["2"]["decode"]["realised"] == 0.75
    assert same["executors"] == {"native": 2} and same["refused"] == {"kernels": "switched off"}
    with pytest.raises(IntegrationError, match="not configured"):
        together([reply(0), {"error": "Skipping is not configured"}])


class Ranked(AceWorker):
    def __init__(self, config: Any, rank: int, tensor: int = 2):
        place = {"tensor_parallel_size": tensor, "rank": rank, "data_parallel_rank": 0}
        self.vllm_config = SimpleNamespace(**vars(config) | {"parallel_config": SimpleNamespace(**place)})


def test_a_worker_answers_with_values(configured: Callable[..., Any]) -> None:
    """Errors too: raised in a worker, one would look like a broken engine."""
    worker = Ranked(configured(), rank=3)
    assert worker.ace_report()["tensor_rank"] == 1
    assert together([worker.ace_set(threshold=[0.1, 0.2])])["threshold"] == {
        "prefill": pytest.approx(0.1)
    } | dict.fromkeys(("decode", "verify"), pytest.approx(0.2))
    for bad, reason in (
        ({}, "not none"),
        ({"skip": 0.5, "threshold": 0.1}, "not both"),
        ({"skip": {"decode": 0.5}}, "names prefill and decode"),
        ({"threshold": "much"}, "A threshold is"),
    ):
        assert reason in worker.ace_set(**bad)["error"]  # type: ignore[arg-type]
    assert worker.ace_report()["tau"][1] == pytest.approx(0.1)  # none of that changed anything
    off = Ranked(SimpleNamespace(additional_config={}), 0)
    assert all("not configured" in answer["error"] for answer in (off.ace_report(), off.ace_set(0.5), off.ace_reset()))


def test_reset(configured: Callable[..., Any]) -> None:
    worker = Ranked(configured(), rank=0)
    made = worker.vllm_config.additional_config.skipping.add(0, "model.layers.0", FOUND)
    made.counts.fill_(5)
    assert worker.ace_report()["counts"]["0"][1] == [5, 5, 5] and together([worker.ace_reset()])["realised"] == 0
    assert made.counts.sum() == 0


def test_a_budget_by_another_texts_thresholds(mapped: Any, configured: Callable[..., Any]) -> None:
    """A name that the plan does not know changes nothing."""
    worker = Ranked(configured(plan=mapped), rank=0)
    skipping = worker.vllm_config.additional_config.skipping
    name = skipping.deciders.plan.workloads[0].name
    assert "error" not in worker.ace_set(skip=0.5, workload=name) and skipping.workload == name
    before = worker.ace_report()
    assert "nothing.txt" in worker.ace_set(skip=0.2, workload="nothing.txt")["error"]
    assert worker.ace_report() == before and skipping.workload == name
