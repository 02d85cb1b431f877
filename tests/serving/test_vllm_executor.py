"""How skipped slots are left out: by the kernel where it is on the allow-list, otherwise compacted, redirected or refused."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import EXPERTS, experts, layer, routing, runner, step
from torch import Tensor

from ace_moe.engines.vllm import backends, executor
from ace_moe.engines.vllm.executor import CompactSlots, Redirect
from ace_moe.engines.vllm.settings import Settings
from ace_moe.errors import IntegrationError


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


def compact(run: Any, x: Tensor, gates: Tensor, ids: Tensor, expert_map: Tensor | None = None) -> Tensor:
    return CompactSlots(SimpleNamespace(expert_map=expert_map))(run, x, gates, ids)


def redirected(gates: Tensor, ids: Tensor) -> Tensor:
    """The ids that reach the kernel."""
    Redirect()(run := Seen(), gates, gates, ids)
    return run.ids


@pytest.mark.parametrize("tokens", [1, 17])
def test_compaction_runs_the_kept_slots_and_no_others(tokens: int) -> None:
    run, (x, gates, ids) = Dense(), skipped(tokens)
    expected = Dense()(x, gates, redirected(gates, ids))
    torch.testing.assert_close(compact(run, x, gates, ids), expected)
    assert run.slots == int((ids >= 0).sum()) < ids.numel()


def test_compaction_with_experts_on_two_ranks() -> None:
    x, gates, ids = skipped(9)
    whole, parts, slots = compact(Dense(), x, gates, ids), torch.zeros_like(x), 0
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
    assert (compact(Dense(), x, gates, torch.full_like(ids, -1)) == 0).all()


def test_redirected_slots_point_at_the_tokens_top_expert() -> None:
    _, gates, ids = skipped(20)
    out = redirected(gates, ids)
    top = ids.gather(-1, gates.argmax(-1, keepdim=True))
    assert torch.equal(out, torch.where(ids < 0, top, ids)) and (out >= 0).all() and (ids < 0).any()


FP8 = {"quant_dtype": torch.float8_e4m3fn}
BLOCKS, PER_TOKEN = {**FP8, "block_shape": [128, 128]}, {**FP8, "per_act_token_quant": True}
MAP = {"expert_map": torch.arange(4)}
LL = "DeepEPLLPrepareAndFinalize"
MODES: list[tuple[str, dict[str, Any], int | None]] = [  # the id a skipped slot has in the kernel; None: redirected
    ("TritonExperts", {}, -1),
    ("TritonExperts", {"kernel_settings": FP8}, None),  # one scale over all rows
    ("TritonExperts", {"kernel_settings": BLOCKS}, -1),
    ("TritonExperts", {"kernel_settings": {"_lora_context": object()}}, None),
    ("TritonExperts", {"prepare": "SomeNewAllToAll"}, None),
    ("MarlinExperts", {}, -1),
    ("HummingIndexedExperts", {}, -1),
    ("HummingGroupedExperts", {}, EXPERTS),
    ("HummingGroupedExperts", MAP, -1),
    ("DeepGemmExperts", {"prepare": "DeepEPHTPrepareAndFinalize"}, -1),
    ("DeepGemmFP4Experts", {}, -1),
    ("CutlassExpertsFp8", {"kernel_settings": PER_TOKEN}, EXPERTS),
    ("CutlassExpertsFp8", {"kernel_settings": FP8}, None),
    ("CutlassExpertsFp8", {"kernel_settings": FP8, **MAP}, -1),
    ("CutlassExpertsW4A8Fp8", {}, EXPERTS),
    ("FlashInferExperts", {}, -1),
    ("BatchedTritonExperts", {"prepare": LL}, -1),
    ("BatchedMarlinExperts", {"prepare": "BatchedPrepareAndFinalize"}, -1),
    ("BatchedTritonExperts", {"prepare": LL, "prepare_settings": {"global_to_physical": 1}}, None),
    ("TritonWNA16Experts", {}, None),
    ("SomethingNew", {}, None),
]


class Seen:
    """What reaches the kernel."""

    def __call__(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **shared: Any) -> Tensor:
        self.ids = topk_ids
        return torch.zeros_like(x)


def chosen(module: Any, **settings: Any) -> tuple[Any, Tensor, Tensor]:
    """What was chosen for a layer, the ids before, and those that reached the kernel."""
    run, (x, gates, ids) = Seen(), skipped(8)
    own = executor.Experts(runner(module), layer(), Settings(kernels=False, **settings))
    own(run, x, gates, ids)
    return own.decider.chosen, ids, run.ids


@pytest.mark.parametrize(("kernel", "more", "mark"), MODES)
def test_only_listed_kernels_see_a_slot_without_expert(kernel: str, more: dict[str, Any], mark: int | None) -> None:
    """Kept slots arrive as they are; the others have the id that this kernel leaves out, or their token's top expert's."""
    module, asked = experts(kernel, **dict(more)), "auto" if mark is None else "native"
    found, ids, given = chosen(module, executor=asked)
    assert torch.equal(given[ids >= 0], ids[ids >= 0])
    assert mark is None or (given[ids < 0] == mark).all()
    assert mark is not None or ((given >= 0).all() and (given < EXPERTS).all())
    assert str(found).removesuffix(" (not tried)") == ("redirect" if mark is None else "native")
    fused = module.quant_method.moe_kernel.fused_experts
    aware = mark is not None and backends.mode_of(fused).aware  # type: ignore[union-attr]
    assert (fused.__dict__.get("moe_sum") is executor.aware_sum) == aware


def test_what_was_only_read_is_used_where_it_is_asked_for() -> None:
    found, ids, given = chosen(experts("FlashInferExperts"))
    assert str(found) == "redirect" and "not tried on a GPU" in found.refused["native"]
    found, ids, given = chosen(experts("FlashInferExperts"), executor="native")
    assert str(found) == "native (not tried)" and (given[ids < 0] == -1).all()
    with pytest.raises(IntegrationError, match="SomethingNew"):
        chosen(experts("SomethingNew"), executor="native")


@pytest.mark.parametrize("tokens", [FP8, BLOCKS])
def test_humming_was_tried_with_tokens_as_they_are(tokens: dict[str, Any]) -> None:
    """Which is what four bits run in; with tokens that it quantises it was only read."""
    assert str(chosen(experts("HummingIndexedExperts"))[0]) == "native"
    found, *_ = chosen(experts("HummingIndexedExperts", kernel_settings=tokens))
    assert str(found) == "redirect" and "not tried on a GPU" in found.refused["native"]


@pytest.mark.parametrize(
    ("kernel", "more", "way"),
    [
        ("MarlinExperts", {}, "native"),
        ("TritonExperts", {"kernel_settings": BLOCKS}, "native"),
        ("TritonExperts", {"kernel_settings": PER_TOKEN}, "redirect"),
    ],
)
def test_what_was_run_with_poisoned_experts_needs_no_asking(kernel: str, more: dict[str, Any], way: str) -> None:
    """FP8 by blocks was; FP8 by tokens goes through other launches of the same class."""
    assert str(chosen(experts(kernel, **more))[0]) == way


def fallback(first: str, second: str, **more: Any) -> Any:
    """A kernel that chooses between two by the size of a step, one of which chooses again."""
    settings = {"kernel_settings": PER_TOKEN}
    parts = [experts(name, **settings).quant_method.moe_kernel.fused_experts for name in (first, second)]
    inner = type("TritonOrDeepGemmExperts", (), {"experts": parts[1], "fallback_experts": parts[1]})()
    given = {"experts": parts[0], "fallback_experts": inner, **more}
    return experts("Either", kernel_settings=given)


@pytest.mark.parametrize(
    ("module", "mark"),
    [
        (fallback("DeepGemmExperts", "TritonExperts"), -1),
        (fallback("CutlassExpertsFp8", "TritonExperts", is_sm100=False), EXPERTS),  # the second never runs
        (fallback("DeepGemmExperts", "SomethingNew"), None),
    ],
)
def test_kernels_that_choose_are_known_by_their_parts(module: Any, mark: int | None) -> None:
    found, ids, given = chosen(module, executor="auto" if mark is None else "native")
    assert (given[ids < 0] == mark).all() if mark is not None else str(found) == "redirect"


def test_parts_that_want_different_ids_are_redirected() -> None:
    with pytest.raises(IntegrationError, match="want different ids"):
        chosen(fallback("CutlassExpertsFp8", "TritonExperts", is_sm100=True), executor="native")


@pytest.mark.parametrize(("version", "way"), [("3.5.1", "native"), ("3.6", "native"), ("3.8", "redirect")])
def test_a_bit_matrix_knows_an_expert_once(version: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots of one token at one expert are one bit there: nothing may be redirected, also where it is asked for."""
    found = SimpleNamespace(get_triton_kernels_version=lambda: version)
    for name in ("vllm", "vllm.utils", "vllm.utils.import_utils"):
        monkeypatch.setitem(sys.modules, name, found)
    assert str(chosen(experts("OAITritonExperts"))[0]) == way
    if way != "redirect":
        with pytest.raises(IntegrationError, match="experts to differ"):
            chosen(experts("OAITritonExperts"), executor="redirect")


@pytest.mark.parametrize(
    ("prepare", "way"), [("MoEPrepareAndFinalizeNoDPEPModular", "compact"), ("AnythingElse", "redirect")]
)
def test_on_a_cpu_kept_slots_run_alone_where_ranks_do_not_exchange_them(prepare: str, way: str) -> None:
    found, _, given = chosen(experts("AnyExperts", device="cpu", prepare=prepare))
    assert str(found) == way and set(found.refused) == {"kernels", "native", "compact"} - {way}
    assert (given >= 0).all()


def test_reasons_are_said_in_words() -> None:
    own = executor.Experts(runner(experts("SomethingNew")), layer(), Settings(kernels="auto"))
    own.choose()
    refused = own.decider.chosen.refused  # type: ignore[union-attr]
    assert refused["native"] == "what SomethingNew does with a slot that has no expert is not known"
    assert refused["compact"] == "it needs a value on the host" and "SomethingNew" in refused["kernels"]


def test_redirect_may_be_asked_for() -> None:
    own = executor.Experts(runner(experts("TritonExperts")), layer(), Settings(executor="redirect"))
    own.choose()  # our kernels would be taken first, were the choice left to us
    assert str(own.decider.chosen) == "redirect" and own.decider.chosen.refused["native"] == "redirect was asked for"  # type: ignore[union-attr]


def test_a_kernel_that_was_built_again_is_chosen_for_again() -> None:
    """Reloading weights builds one: its sum would add rows that were never written."""
    module, (x, gates, ids) = experts("TritonExperts"), skipped(3)
    own = executor.Experts(runner(module), layer(), Settings(kernels=False))
    own(Seen(), x, gates, ids)
    first = own.decider.chosen
    own(Seen(), x, gates, ids)
    assert own.decider.chosen is first
    built = experts("TritonExperts").quant_method.moe_kernel
    module.quant_method.moe_kernel = built
    own(Seen(), x, gates, ids)
    assert built.fused_experts.moe_sum is executor.aware_sum and str(own.decider.chosen) == "native"
    module.quant_method.moe_kernel = experts("SomethingNew").quant_method.moe_kernel
    own(run := Seen(), x, gates, ids)
    assert str(own.decider.chosen) == "redirect" and (run.ids >= 0).all()


def test_our_kernels_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the engine's own way; the name in the report says both."""
    from ace_moe.engines.vllm.kernels import OurKernels

    def ours(run: Any, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        return torch.full_like(x, 7)

    monkeypatch.setattr(OurKernels, "of", classmethod(lambda *given, **more: ours))
    own = executor.Experts(runner(experts("TritonExperts")), layer(), Settings(kernels=4))
    for tokens, expected in ((4, 7), (5, 0)):
        x, gates, ids = skipped(tokens)
        out = own(lambda x, **more: torch.zeros_like(x), x, gates, ids)
        assert (out == expected).all()
    assert str(own.decider.chosen) == "native, kernels to 4 tokens"


def test_padding_is_no_slot_for_any_way() -> None:
    """Rows of −1 with gates that are not 0, as vLLM's routers leave them."""
    x, gates, ids = skipped(5)
    ids[3:] = -1
    out = redirected(gates, ids)
    assert (out[3:] == 0).all() and (out >= 0).all()
    run = Dense()
    assert (compact(run, x, gates, ids)[3:] == 0).all() and run.slots == int((ids >= 0).sum())


def test_unknown_kernel_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    executor.warn_redirect.cache_clear()
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
