"""The rule in a vLLM layer: a threshold and counters for each phase, and the same decisions from torch and the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from serving_parts import EXPERTS, TOP_K, layer, routing

from ace_moe import rule
from ace_moe.integrations.vllm.layer import SKIPPED
from ace_moe.integrations.vllm.phases import Phases
from ace_moe.kernels.routing import TopK


def test_each_phase_has_its_threshold_and_its_counters() -> None:
    own, (gates, ids) = layer(), routing(6)
    own.phases.mark(np.array([3, 1, 1]))  # three of prefill, two of decode, the rest is padding
    new_gates, new_ids = own.route(gates, ids)
    for rows, tau in ((slice(0, 3), 0.1), (slice(3, 5), 0.18)):
        wide = ids[rows].long()
        c = torch.maximum(*(rule.share(gates[rows], own.tables[n][wide]) for n in ("gsp", "rcr")))
        keep, expected = rule.decide(rule.protect(c, gates[rows], wide), gates[rows], tau, "power")
        assert torch.equal(new_ids[rows] != SKIPPED, keep) and torch.equal(new_gates[rows], expected)
        assert own.counts[0 if tau == 0.1 else 1].tolist() == [keep.numel(), int(keep.sum())]
    assert new_ids.dtype == torch.int32 and (new_gates[new_ids == SKIPPED] == 0).all()


def test_threshold_zero_returns_the_same_bits() -> None:
    own, (gates, ids) = layer(taus=(0.0, 0.0)), routing(9)
    new_gates, new_ids = own.route(gates, ids)
    assert torch.equal(new_gates, gates) and torch.equal(new_ids, ids)


KERNEL_CASES = [
    ("ace", {}),
    ("ace", {"fusion": "mean", "gain": "kept", "min_active": 3}),
    ("gsp", {"gain": "none"}),
    ("share", {"min_mass": 0.7}),
]


@pytest.mark.parametrize(("policy", "settings"), KERNEL_CASES)
@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_kernel_decides_like_torch(policy: str, settings: dict[str, Any], tokens: int) -> None:
    pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    first, second = layer(policy, **settings), layer(policy, **settings)
    gates, ids = routing(tokens)
    for own in (first, second):
        own.phases.mark(np.array([max(1, tokens // 2), *[1] * (tokens // 4)]))
    phases = first.phases.of(tokens)
    expected_gates, expected_ids = first._route_torch(gates, ids, phases)
    new_gates, new_ids = second._route_kernel(gates, ids, phases)
    assert torch.equal(new_ids, expected_ids)
    torch.testing.assert_close(new_gates, expected_gates, rtol=1e-6, atol=1e-7)
    assert torch.equal(first.counts, second.counts) and first.counts.sum() > 0


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_fused_routing_is_top_k_and_rule(sigmoid: bool, tokens: int) -> None:
    pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(3))
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    gates, ids = scores.topk(TOP_K)
    first, second = layer(), layer()
    for own in (first, second):
        own.phases = Phases(128, "cpu")
        own.phases.mark(np.array([1] * (tokens // 2 + 1)))
    expected_gates, expected_ids = first.route(gates / gates.sum(-1, keepdim=True), ids.int())
    new_gates, new_ids = second.route_logits(logits, TopK(TOP_K, sigmoid, True), torch.int32)
    assert torch.equal(new_ids, expected_ids) and torch.equal(first.counts, second.counts)
    torch.testing.assert_close(new_gates, expected_gates, rtol=1e-5, atol=1e-6)
