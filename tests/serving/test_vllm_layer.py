"""The rule in a vLLM layer: a threshold and counters for each kind of token, the same decisions from torch and kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving_parts import EXPERTS, TOP_K, layer, routing, step

from ace_moe import rule
from ace_moe.decider import Decider, row_of
from ace_moe.decider.rows import Phase
from ace_moe.engines.vllm.skipping import SKIPPED
from ace_moe.engines.vllm.steps import Step
from ace_moe.kernels.routing import TopK

MIXED = step([3, 1, 3], [0, 9, 9], [3, 4, 4], [0, 0, 2])  # three of a prompt, two generated, two drafts


def test_each_phase_has_its_threshold_and_its_counters() -> None:
    own, (ids, gates) = layer(step=MIXED), routing(8)  # the last is padding
    own.state.set(torch.tensor([0.0, 0.1, 0.18, 0.14]))
    new_ids, new_gates = own.decide(ids, gates)
    parts: list[tuple[list[int], float, Phase]] = [([0, 1, 2], 0.1, "prefill"), ([3, 4], 0.18, "decode")]
    for at, tau, phase in [*parts, ([5, 6], 0.14, "verify")]:
        wide = ids[at].long()
        c = torch.maximum(*(rule.share(gates[at], getattr(own, f"table_{n}")[wide]) for n in ("gsp", "rcr")))
        keep, expected = rule.decide(rule.protect(c, gates[at], wide), gates[at], tau, "power")
        assert torch.equal(new_ids[at] != SKIPPED, keep) and torch.equal(new_gates[at], expected)
        assert own.counts[row_of(phase)].tolist() == [keep.numel(), int(keep.sum()), 0]
    assert new_ids.dtype == torch.int32 and (new_gates[new_ids == SKIPPED] == 0).all()
    assert own.counts[0].tolist() == [0, 0, 0]


def test_threshold_zero_returns_the_same_bits() -> None:
    own, (ids, gates) = layer(taus=(0.0, 0.0), step=MIXED), routing(9)
    new_ids, new_gates = own.decide(ids, gates)
    assert torch.equal(new_gates, gates) and torch.equal(new_ids, ids)


def poisoned(own: Decider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables inside a larger tensor of NaN: a look-up in front of one, or at its wrapped end, would show."""
    for name in ("gsp", "rcr"):
        around = torch.full((EXPERTS + 2 * TOP_K,), torch.nan)
        around[TOP_K:-TOP_K] = getattr(own, f"table_{name}")
        inner = around[TOP_K:-TOP_K]
        inner[-1] = torch.nan
        monkeypatch.setitem(own._buffers, f"table_{name}", inner)


@pytest.mark.parametrize("kernels", [False, True])
def test_padding_never_indexes_a_table(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's routers give padding the id −1 and leave its gates as they are."""
    if kernels:
        pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    own, (ids, gates) = layer(step=MIXED, kernels=kernels), routing(12)
    ids[ids == EXPERTS - 1] = EXPERTS - 2  # the poisoned expert is nobody's
    ids[7:] = -1
    expected = layer(step=MIXED).decide(ids[:7], gates[:7])
    poisoned(own, monkeypatch)
    new_ids, new_gates = own.decide(ids, gates)
    assert torch.equal(new_ids[:7], expected[0]) and (new_ids[7:] == SKIPPED).all()
    torch.testing.assert_close(new_gates[:7], expected[1], rtol=1e-6, atol=1e-7)
    assert new_gates.isfinite().all() and own.counts.sum(0)[0] == 7 * TOP_K


KERNEL_CASES = [
    ("ace", {}),
    ("ace", {"fusion": "mean", "gain": "kept", "min_active": 3}),
    ("gsp", {"gain": "none"}),
    ("share", {"min_mass": 0.7}),
]


def halves(tokens: int) -> Step:
    """Half of the tokens a prompt, a quarter generated, the rest padding."""
    return step([max(1, tokens // 2), *[1] * (tokens // 4)], 9, [1000] + [4] * (tokens // 4))


@pytest.mark.parametrize(("policy", "settings"), KERNEL_CASES)
@pytest.mark.parametrize("tokens", [1, 5, 33, 300])
def test_kernel_decides_like_torch(policy: str, settings: dict[str, Any], tokens: int) -> None:
    pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    first, second = (layer(policy, step=halves(tokens), kernels=k, **settings) for k in (False, True))
    assert second.kernel is not None and first.kernel is None
    given, real = routing(tokens), max(1, tokens // 2) + tokens // 4
    expected_ids, expected_gates = first.decide(*given)
    new_ids, new_gates = second.decide(*given)
    assert torch.equal(new_ids[:real], expected_ids[:real])
    torch.testing.assert_close(new_gates[:real], expected_gates[:real], rtol=1e-6, atol=1e-7)
    assert (new_ids[real:] == SKIPPED).all() and (new_gates[real:] == 0).all()  # padding runs no expert
    assert torch.equal(first.counts, second.counts) and first.counts.sum() > 0


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_fused_routing_is_top_k_and_rule(sigmoid: bool, tokens: int) -> None:
    pytest.importorskip("triton", reason="the kernel runs in Triton's interpreter")
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(3))
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    gates, ids = scores.topk(TOP_K)
    real = tokens // 2 + 1
    first, second = (layer(step=step([1] * real), kernels=k) for k in (False, True))
    expected_ids, expected_gates = first.decide(ids.int(), gates / gates.sum(-1, keepdim=True))
    new_ids, new_gates = second.route(logits, TopK(TOP_K, sigmoid, True), torch.float32, torch.int32)
    assert torch.equal(new_ids[:real], expected_ids[:real]) and torch.equal(first.counts, second.counts)
    torch.testing.assert_close(new_gates[:real], expected_gates[:real], rtol=1e-5, atol=1e-6)
    assert (new_ids[real:] == SKIPPED).all() and (new_gates[real:] == 0).all()  # as vLLM's own router does
