"""How skipped slots are left out: by the kernel where it is on the allow-list, otherwise compacted, redirected or refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import EXPERTS, experts, layer, routing, step
from torch import Tensor

from ace_moe.errors import IntegrationError
from ace_moe.integrations.vllm import executor
from ace_moe.integrations.vllm.executor import TABLE, compact, redirected
from ace_moe.integrations.vllm.settings import Settings


class Dense:
    """A stand-in for a layer's kernel: y = Σ g_i · W_e x; ids outside [0, E) would be an error, as in C."""

    def __init__(self) -> None:
        self.weights = torch.randn(EXPERTS, 8, 8, generator=torch.Generator().manual_seed(2))
        self.slots = 0

    def __call__(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        assert ((topk_ids >= 0) & (topk_ids < EXPERTS)).all()
        self.slots += topk_ids.numel()
        return torch.einsum("tk,tkab,tb->ta", topk_weights, self.weights[topk_ids.long()], x)


def skipped(tokens: int, tau: float = 0.15) -> tuple[Tensor, Tensor, Tensor]:
    ids, gates = layer(taus=(tau, tau), step=step([1] * tokens)).decide(*routing(tokens))
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(5)), gates, ids


@pytest.mark.parametrize("tokens", [1, 17])
def test_compaction_runs_the_kept_slots_and_no_others(tokens: int) -> None:
    run, (x, gates, ids) = Dense(), skipped(tokens)
    expected = Dense()(x, gates, redirected(gates, ids))
    torch.testing.assert_close(compact(run, x, gates, ids, None), expected)
    assert run.slots == int((ids >= 0).sum()) < ids.numel()


def test_compaction_with_experts_on_two_ranks() -> None:
    x, gates, ids = skipped(9)
    whole, parts, slots = compact(Dense(), x, gates, ids, None), torch.zeros_like(x), 0
    for rank in range(2):
        run = Dense()
        run.weights = run.weights[rank * 8 : rank * 8 + 8]
        local = torch.full((EXPERTS,), -1, dtype=torch.int32)
        local[rank * 8 : rank * 8 + 8] = torch.arange(8, dtype=torch.int32)
        parts += compact(run, x, gates, ids, local)
        slots += run.slots
    torch.testing.assert_close(parts, whole)
    assert slots == int((ids >= 0).sum())


def test_a_rank_without_any_slot_returns_zeros() -> None:
    x, gates, ids = skipped(3)
    assert (compact(Dense(), x, gates, torch.full_like(ids, -1), None) == 0).all()


def test_redirected_slots_point_at_the_tokens_top_expert() -> None:
    _, gates, ids = skipped(20)
    out = redirected(gates, ids)
    top = ids.gather(-1, gates.argmax(-1, keepdim=True))
    assert torch.equal(out, torch.where(ids < 0, top, ids)) and (out >= 0).all() and (ids < 0).any()


def runner(module: Any, gathered: bool = False) -> Any:
    return SimpleNamespace(routed_experts=module, do_naive_dispatch_combine=gathered, layer_name=module.layer_name)


MODES = [
    ("TritonExperts", {}, "native"),
    ("MarlinExperts", {}, "native (not tried)"),
    ("DeepGemmExperts", {}, "native (not tried)"),
    ("TritonExperts", {"kernel_settings": {"quant_dtype": torch.float8_e4m3fn}}, "redirect"),
    ("TritonExperts", {"kernel_settings": {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}}, "native"),
    ("TritonExperts", {"kernel_settings": {"_lora_context": object()}}, "redirect"),
    ("CutlassExpertsFp8", {}, "redirect"),
    ("CutlassExpertsFp8", {"expert_map": torch.arange(4)}, "native (not tried)"),
    ("FlashInferExperts", {}, "redirect"),
    ("SomethingNew", {}, "redirect"),
    ("TritonExperts", {"prepare": "SomeNewAllToAll"}, "redirect"),
    ("DeepGemmExperts", {"prepare": "DeepEPHTPrepareAndFinalize"}, "native (not tried)"),
    ("BatchedTritonExperts", {"prepare": "DeepEPLLPrepareAndFinalize"}, "native (not tried)"),
    (
        "BatchedTritonExperts",
        {"prepare": "DeepEPLLPrepareAndFinalize", "prepare_settings": {"global_to_physical": 1}},
        "redirect",
    ),
    ("CPUUnquantizedExperts", {"device": "cpu"}, "compact"),
    ("AnyExperts", {"device": "cpu"}, "compact"),
    ("AnyExperts", {"device": "cpu", "prepare": "MoEPrepareAndFinalizeNaiveDPEPModular"}, "redirect"),
]


@pytest.mark.parametrize(("kernel", "more", "mode"), MODES)
def test_only_listed_kernels_see_a_slot_without_expert(kernel: str, more: dict[str, Any], mode: str) -> None:
    """What reaches the kernel is recorded: −1 only where the mode is native."""
    module = experts(kernel, **dict(more))
    given: list[Tensor] = []

    def run(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **shared: Any) -> Tensor:
        given.append(topk_ids)
        return torch.zeros_like(x)

    x, gates, ids = skipped(8)
    own = executor.Experts(runner(module), layer(), Settings(kernels=False))
    own(run, x, gates, ids)
    chosen = own.layer.chosen
    assert str(chosen) == mode
    mode = mode.removesuffix(" (not tried)")
    assert set(chosen.refused) == {"kernels", "native", "compact"} - {mode} - (
        {"compact"} if mode == "native" else set()
    )
    assert bool((given[0] < 0).any()) == (mode == "native")
    aware = module.quant_method.moe_kernel.fused_experts.__dict__.get("moe_sum")
    assert (aware is executor.aware_sum) == (mode == "native" and TABLE[kernel].aware)


def test_reasons_are_said_in_words() -> None:
    own = executor.Experts(runner(experts("FlashInferExperts")), layer(), Settings(kernels="auto"))
    own.choose()
    refused = own.layer.chosen.refused  # type: ignore[union-attr]
    assert refused["native"] == "what FlashInferExperts does with a slot that has no expert is not known"
    assert refused["compact"] == "it needs a value on the host" and "FlashInferExperts" in refused["kernels"]


def test_redirect_may_be_asked_for() -> None:
    own = executor.Experts(runner(experts("TritonExperts")), layer(), Settings(executor="redirect"))
    own.choose()  # our kernels would be taken first, were the choice left to us
    assert str(own.layer.chosen) == "redirect" and own.layer.chosen.refused["native"] == "redirect was asked for"  # type: ignore[union-attr]


def test_our_kernels_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the engine's own way; the name in the report says both."""
    from ace_moe.integrations.vllm.kernels import Kernels

    def ours(run: Any, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        return torch.full_like(x, 7)

    monkeypatch.setattr(Kernels, "of", classmethod(lambda *given, **more: ours))
    own = executor.Experts(runner(experts("TritonExperts")), layer(), Settings(kernels=4))
    for tokens, expected in ((4, 7), (5, 0)):
        x, gates, ids = skipped(tokens)
        out = own(lambda x, **more: torch.zeros_like(x), x, gates, ids)
        assert (out == expected).all()
    assert str(own.layer.chosen) == "native, kernels to 4 tokens"


def test_padding_is_no_slot_for_any_way() -> None:
    """Rows of −1 with gates that are not 0, as vLLM's routers leave them."""
    x, gates, ids = skipped(5)
    ids[3:] = -1
    out = redirected(gates, ids)
    assert (out[3:] == 0).all() and (out >= 0).all()
    run = Dense()
    assert (compact(run, x, gates, ids, None)[3:] == 0).all() and run.slots == int((ids >= 0).sum())


def test_unknown_kernel_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    executor._warned.clear()
    with caplog.at_level(logging.WARNING, "vllm.ace_moe"):
        for _ in range(2):
            executor.warn_redirect("SomethingNew", "what it does with a slot that has no expert is not known")
    (message,) = [r.getMessage() for r in caplog.records]
    assert "SomethingNew" in message and "prefill gets no" in message and "--moe-backend triton" in message


def test_monolithic_kernel_is_refused() -> None:
    module = experts("TrtLlmBf16ExpertsMonolithic")
    module.quant_method.is_monolithic = True
    with pytest.raises(IntegrationError, match="--moe-backend triton"):
        executor.Experts(runner(module), layer(), Settings())(Dense(), *skipped(2))


def test_kernel_that_gathers_tokens_before_routing_is_refused() -> None:
    with pytest.raises(IntegrationError, match="gathers the tokens of all ranks"):
        executor.Experts(runner(experts("TritonExperts"), gathered=True), layer(), Settings()).choose()
