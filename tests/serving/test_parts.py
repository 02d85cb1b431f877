"""The parts of the vLLM plugin that need no vLLM: phases, rule, executors and their allow-list, reports, HTTP."""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ace_moe import rule
from ace_moe.demo import MODEL
from ace_moe.dispatch.routing import TopK
from ace_moe.errors import BudgetError, IntegrationError, PlanError
from ace_moe.integrations.vllm import engine_args, executor, skipping
from ace_moe.integrations.vllm import phases as phases_module
from ace_moe.integrations.vllm.control import merge
from ace_moe.integrations.vllm.executor import compact, mode_of, redirected
from ace_moe.integrations.vllm.http import AceMiddleware
from ace_moe.integrations.vllm.kernels import DecodeKernels, unfit
from ace_moe.integrations.vllm.layer import SKIPPED, Layer
from ace_moe.integrations.vllm.phases import PADDING, Phases
from ace_moe.integrations.vllm.settings import AUTO_KERNEL_TOKENS, MOST_KERNEL_TOKENS, Settings, check_policy
from ace_moe.plan import Plan
from ace_moe.policies import make

EXPERTS, TOP_K = 16, 6


def layer(policy: str = "ace", taus: tuple[float, float] = (0.1, 0.18), **settings: Any) -> Layer:
    generator = torch.Generator().manual_seed(0)
    tables = {name: torch.rand(EXPERTS, generator=generator) + 0.5 for name in ("gsp", "rcr")}
    return Layer("0", make(policy, **settings), tables, torch.tensor(taus), Phases(512, "cpu"))


def routing(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """gates, ids [T, k] as vLLM's router gives them: fp32 and int32."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1)
    gates, ids = scores.topk(TOP_K)
    return gates / gates.sum(-1, keepdim=True), ids.int()


# ---- phases -------------------------------------------------------------------------------------------------------


def test_phases_come_from_query_lengths() -> None:
    phases = Phases(16, "cpu")
    assert (phases.of(16) == PADDING).all()
    phases.mark(np.array([1, 3, 1]))
    assert phases.of(7).tolist() == [1, 0, 0, 0, 1, PADDING, PADDING]
    assert phases.of(2, start=1).tolist() == [0, 0]  # the part of a rank under sequence parallelism
    phases.decode_length = 3  # speculative decoding: two drafted tokens
    phases.mark(np.array([3, 4]))
    assert phases.of(8).tolist() == [1, 1, 1, 0, 0, 0, 0, PADDING]
    phases.clear()
    assert (phases.of(16) == PADDING).all()


def test_a_steady_decode_writes_nothing() -> None:
    phases = Phases(16, "cpu")
    phases.mark(np.array([1, 1]))
    phases.buffer[0] = 7
    phases.mark(np.array([1, 1]))
    assert phases.buffer[0] == 7
    phases.mark(np.array([1, 1, 1]))
    assert phases.of(4).tolist() == [1, 1, 1, PADDING]


def test_a_step_larger_than_announced_is_an_error() -> None:
    with pytest.raises(IntegrationError, match="larger than"):
        Phases(16, "cpu").of(5000)


# ---- the rule -----------------------------------------------------------------------------------------------------


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


# ---- executors ----------------------------------------------------------------------------------------------------


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
    own = layer(taus=(tau, tau))
    gates, ids = own.route(*routing(tokens))
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


def experts(kernel: str, prepare: str = "MoEPrepareAndFinalizeNoDPEPModular", device: str = "cuda", **more: Any) -> Any:
    """A stand-in for a RoutedExperts module whose kernel has this class name."""
    settings = {
        "quant_dtype": None, "a2_scale": None, "block_shape": None, "per_act_token_quant": False, "_lora_context": None,
        "w1_scale": None, **more.pop("kernel_settings", {}),
    }  # fmt: skip
    fused = type(kernel, (), settings)()
    made = type(prepare, (), more.pop("prepare_settings", {}))()
    method = SimpleNamespace(
        moe_kernel=SimpleNamespace(fused_experts=fused, prepare_finalize=made), is_monolithic=False
    )
    config = SimpleNamespace(device=device, has_bias=False)
    given = {
        "expert_map": None,
        "activation": SimpleNamespace(value="silu"),
        "apply_router_weight_on_input": False,
        **more,
    }
    return SimpleNamespace(quant_method=method, moe_config=config, layer_name="model.layers.0.mlp.experts", **given)


def runner(module: Any, gathered: bool = False) -> Any:
    return SimpleNamespace(routed_experts=module, do_naive_dispatch_combine=gathered, layer_name=module.layer_name)


MODES = [
    ("TritonExperts", {}, "native"),
    ("MarlinExperts", {}, "native"),
    ("DeepGemmExperts", {}, "native"),
    ("TritonExperts", {"kernel_settings": {"quant_dtype": torch.float8_e4m3fn}}, "redirect"),
    ("TritonExperts", {"kernel_settings": {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}}, "native"),
    ("TritonExperts", {"kernel_settings": {"_lora_context": object()}}, "redirect"),
    ("CutlassExpertsFp8", {}, "redirect"),
    ("CutlassExpertsFp8", {"expert_map": torch.arange(4)}, "native"),
    ("FlashInferExperts", {}, "redirect"),
    ("SomethingNew", {}, "redirect"),
    ("TritonExperts", {"prepare": "SomeNewAllToAll"}, "redirect"),
    ("DeepGemmExperts", {"prepare": "DeepEPHTPrepareAndFinalize"}, "native"),
    ("BatchedTritonExperts", {"prepare": "DeepEPLLPrepareAndFinalize"}, "native"),
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
    assert mode_of(module, module.quant_method.moe_kernel.fused_experts)[0] == mode
    given: list[Tensor] = []

    def run(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **shared: Any) -> Tensor:
        given.append(topk_ids)
        return torch.zeros_like(x)

    x, gates, ids = skipped(8)
    own = executor.Executor(runner(module), layer(), Settings(kernels=False))
    own(run, x, gates, ids)
    assert bool((given[0] < 0).any()) == (mode == "native")
    aware = module.quant_method.moe_kernel.fused_experts.__dict__.get("moe_sum")
    assert (aware is executor.aware_sum) == (mode == "native" and kernel in executor.ALIGNED)


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
        executor.Executor(runner(module), layer(), Settings())(Dense(), *skipped(2))


def test_kernel_that_gathers_tokens_before_routing_is_refused() -> None:
    with pytest.raises(IntegrationError, match="gathers the tokens of all ranks"):
        executor.Executor(runner(experts("TritonExperts"), gathered=True), layer(), Settings()).choose()


# ---- our decode kernels -------------------------------------------------------------------------------------------


def unquantised(tokens: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    w13, w2 = (torch.randn(EXPERTS, *s, generator=generator) / 8 for s in ((64, 48), (48, 32)))
    module = experts("TritonExperts", device="cpu", w13_weight=w13, w2_weight=w2)
    gates, ids = layer(taus=(0.15, 0.15)).route(*routing(tokens))
    return module, torch.randn(tokens, 48, generator=generator), gates, ids


@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 1e-4, 1e-5), (torch.float16, 1e-2, 2e-3)])
def test_decode_kernels_run_vllms_layout(tokens: int, dtype: torch.dtype, rtol: float, atol: float) -> None:
    """Gate then up in w13 [E, 2m, d], w2 [E, d, m]; slots with id −1 are not run; gates stay fp32 as vLLM has them."""
    pytest.importorskip("triton", reason="the kernels run in Triton's interpreter")
    module, x, gates, ids = unquantised(tokens)
    kernels = DecodeKernels.of(module, module.quant_method.moe_kernel.fused_experts)
    assert isinstance(kernels, DecodeKernels)
    gate, up = torch.einsum("eab,tb->tea", module.w13_weight, x).chunk(2, -1)
    every = torch.einsum("eab,teb->tea", module.w2_weight, torch.nn.functional.silu(gate) * up)
    chosen = every.gather(1, ids.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, 48))
    expected = (chosen * gates.unsqueeze(-1)).sum(1)
    module.w13_weight, module.w2_weight = (w.to(dtype) for w in (module.w13_weight, module.w2_weight))
    found = kernels(x.to(dtype), gates, ids)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)


def test_decode_kernels_say_what_they_cannot_run() -> None:
    module, *_ = unquantised(1)
    kernel = module.quant_method.moe_kernel.fused_experts
    assert unfit(module, kernel) == ""
    for name, value in (("expert_map", torch.arange(4)), ("activation", "gelu"), ("swiglu_limit", 7.0)):
        changed = SimpleNamespace(**{**vars(module), name: value})
        assert unfit(changed, kernel)
    assert "back end" in unfit(module, object())


def test_kernels_setting() -> None:
    assert Settings().kernel_tokens == AUTO_KERNEL_TOKENS
    assert Settings(kernels=True).kernel_tokens == MOST_KERNEL_TOKENS
    assert Settings(kernels=False).kernel_tokens == 0
    assert Settings(kernels=8).kernel_tokens == 8


# ---- reports and HTTP ---------------------------------------------------------------------------------------------


def reply(rank: int, split: bool = False, data: int = 0) -> dict[str, Any]:
    return {
        "skip": 0.5, "thresholds": [0.1, 0.2], "counts": {"2": [[80, 40], [16, 4]], "10": [[80, 80], [16, 16]]},
        "executors": {"2": "native", "10": "native"}, "split": split, "tensor_rank": rank, "data_rank": data,
    }  # fmt: skip


def test_ranks_that_see_the_same_tokens_count_once() -> None:
    same, parts = merge([reply(0), reply(1)]), merge([reply(0, split=True), reply(1, split=True)])
    assert same["prefill"] == {"routed": 160, "kept": 120, "realised": 0.25}
    assert parts["prefill"] == {"routed": 320, "kept": 240, "realised": 0.25}
    assert list(same["layers"]) == ["2", "10"] and same["layers"]["2"]["decode"]["realised"] == 0.75
    with pytest.raises(IntegrationError, match="not configured"):
        merge([reply(0), {"error": "Skipping is not configured"}])


class App:
    """An ASGI app with a metrics page, and an engine that answers RPCs."""

    def __init__(self, key: list[str] | None = None):
        self.state = SimpleNamespace(engine_client=self, args=SimpleNamespace(api_key=key))
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append((method, kwargs))
        return [reply(0)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"9")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"vllm:a 1\n"})


def request(app: App, path: str, method: str = "GET", body: bytes = b"", headers: Any = ()) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "headers": list(headers), "app": app}
    asyncio.run(AceMiddleware(app)(scope, receive, send))
    length = dict(sent[0]["headers"])[b"content-length"]
    assert int(length) == len(sent[1]["body"])
    return sent[0]["status"], sent[1]["body"]


def test_routes_and_keys() -> None:
    assert request(App(), "/other") == (200, b"vllm:a 1\n")
    status, body = request(App(), "/ace")
    assert status == 200 and json.loads(body)["threshold"] == {"prefill": 0.1, "decode": 0.2}
    app = App()
    assert request(app, "/ace", "POST", b'{"skip": 0.4, "reset": true}')[0] == 200
    assert app.calls == [("ace_reset", {}), ("ace_set", {"skip": 0.4})]
    for bad in (b"", b"[]", b"{}", b'{"skp": 1}', b"\xff"):
        assert request(App(), "/ace", "POST", bad)[0] == 400
    assert request(App(), "/ace", "DELETE")[0] == 405
    assert request(App(["key"]), "/ace")[0] == 401
    assert request(App(["key"]), "/ace", headers=[(b"authorization", b"Bearer key")])[0] == 200


def test_server_without_skipping_does_not_start() -> None:
    async def nothing(method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"error": "Skipping is not configured in this server."}]

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app, sent = App(), []  # type: ignore[var-annotated]
    app.collective_rpc = nothing  # type: ignore[method-assign]
    asyncio.run(AceMiddleware(app)({"type": "lifespan", "app": app}, receive, send))
    assert [m["type"] for m in sent] == ["lifespan.startup.failed"] and "not configured" in sent[0]["message"]


def test_metrics_are_added_to_vllms_page() -> None:
    pytest.importorskip("prometheus_client")
    status, body = request(App(), "/metrics", headers=[(b"accept-encoding", b"gzip")])
    lines = body.decode().splitlines()
    assert status == 200 and lines[0] == "vllm:a 1"
    assert 'ace:slots_kept_total{layer="2",phase="decode"} 4.0' in lines
    assert 'ace:realised_ratio{layer="2",phase="prefill"} 0.5' in lines
    assert 'ace:threshold{phase="decode"} 0.2' in lines and 'ace:budget{phase="decode"} 0.5' in lines


# ---- the engine's side ---------------------------------------------------------------------------------------------


def vllm_config(plan: Path, **ace: Any) -> Any:
    """A stand-in with what the plugin reads of vLLM's configuration."""
    model = SimpleNamespace(model=str(MODEL), hf_text_config=SimpleNamespace(num_hidden_layers=6))
    return SimpleNamespace(
        additional_config={"ace": {"plan": str(plan), **ace}, "other": 1}, model_config=model, lora_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), device_config=SimpleNamespace(device="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )  # fmt: skip


@pytest.fixture
def configured(demo_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(skipping, "listen", lambda find: None)
    path = demo_plan.save(tmp_path / "plan.safetensors")

    def make(**ace: Any) -> Any:
        config = vllm_config(path, **ace)
        assert skipping.configure(config) is not None
        return config

    return make


def test_budgets_are_not_in_the_compile_hash(configured: Callable[..., Any]) -> None:
    first, second = configured(), configured(gain="none")
    skipping.find(second).set_threshold(0.2)
    assert json.dumps(first.additional_config, sort_keys=True) == json.dumps(second.additional_config, sort_keys=True)
    assert type(pickle.loads(pickle.dumps(first.additional_config))) is dict
    assert copy.deepcopy(first.additional_config).skipping is skipping.find(first) is skipping.configure(first)


def test_vllms_default_type_and_device_are_not_inherited(configured: Callable[..., Any]) -> None:
    """vLLM builds layers under the model's type and on its device; the plan is read and checked all the same."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            own = skipping.find(configured())
            made = own.add(0, "model.layers.0.mlp.experts", FOUND)
    finally:
        torch.set_default_dtype(torch.float32)
    for tensor in (own.thresholds, *made.tables.values()):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    assert made.counts.device.type == own.phases.buffer.device.type == "cpu"


def test_no_configuration_no_skipping() -> None:
    for additional in ({}, {"other": 1}, None):
        config = SimpleNamespace(additional_config=additional)
        assert skipping.configure(config) is None and config.additional_config is additional
    assert skipping.configure(None) is None


FOUND = {"experts": 32, "top_k": 8, "hidden": 192, "intermediate": 48}


def test_layers_are_checked_as_they_come(configured: Callable[..., Any]) -> None:
    own = skipping.find(configured())
    assert own.add(0, "model.layers.0.mlp.experts", FOUND) is own.layers["0"]
    assert own.add(0, "draft_model.model.layers.0.mlp.experts", FOUND) is None
    assert own.add(6, "model.layers.6.mlp.experts", FOUND) is None  # an MTP head
    with pytest.raises(PlanError, match="layer 1 has experts 32 in the plan, 64 in the model"):
        own.add(1, "model.layers.1.mlp.experts", {**FOUND, "experts": 64})
    with pytest.raises(IntegrationError, match=r"vLLM runs layer 1 \(and 4 more\) outside"):
        own.ready(SimpleNamespace())


def test_runner_hooks(configured: Callable[..., Any]) -> None:
    """Both generations of vLLM's model runner, by their signatures; an engine without skipping passes through."""

    class Old:
        def __init__(self, config: Any):
            self.vllm_config, self.uniform_decode_query_len = config, 2

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> str:
            return "inputs"

        def _dummy_run(self, tokens: int) -> int:
            return tokens

        def initialize_kv_cache(self, config: Any) -> str:
            return "cache"

    class New(Old):  # in vLLM they are not related
        def prepare_inputs(self, *args: Any) -> Any:
            return SimpleNamespace(num_scheduled_tokens=np.array([1, 5], dtype=np.int32))

    phases_module._hook(Old, "_prepare_inputs", phases_module._lengths_v1, skipping.find)
    phases_module._hook(New, "prepare_inputs", phases_module._lengths_v2, skipping.find)
    config = configured()
    own = skipping.find(config)
    for n in range(6):
        own.add(n, f"model.layers.{n}", FOUND)
    for runner in (Old(config), Old(SimpleNamespace(additional_config={}))):
        assert runner.initialize_kv_cache(None) == "cache"
        assert runner._prepare_inputs(None, num_scheduled_tokens=np.array([2, 3])) == "inputs"
        assert own.phases.decode_length == 2 and own.phases.of(6).tolist() == [1, 1, 0, 0, 0, PADDING]
    New(config).prepare_inputs(None, None)
    assert own.phases.of(7).tolist() == [1, 0, 0, 0, 0, 0, PADDING]
    assert Old(config)._dummy_run(4) == 4 and (own.phases.of(7) == PADDING).all()


@pytest.mark.vllm
def test_vllm_has_what_is_hooked() -> None:
    """In both generations of the model runner, of which a CPU runs only the first."""
    import vllm

    root = Path(vllm.__file__).parent / "v1" / "worker"
    for file, prepare in (("gpu_model_runner.py", "_prepare_inputs"), ("gpu/model_runner.py", "prepare_inputs")):
        tree = ast.parse((root / file).read_text())
        (runner,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GPUModelRunner"]
        methods = {n.name: [a.arg for a in n.args.args] for n in runner.body if isinstance(n, ast.FunctionDef)}
        assert {prepare, "_dummy_run", "initialize_kv_cache"} <= set(methods)
        assert file.startswith("gpu/") or methods[prepare][2] == "num_scheduled_tokens"
    assert "num_scheduled_tokens: np.ndarray" in (root / "gpu/input_batch.py").read_text()


# ---- configuration ------------------------------------------------------------------------------------------------


def test_engine_args() -> None:
    found = engine_args("plan.safetensors", {"prefill": 0.5}, gain="none")
    ace = found["additional_config"]["ace"]
    assert ace["plan"].startswith("/") and ace["skip"] == {"prefill": 0.5} and ace["gain"] == "none"
    settings = Settings.from_dict(ace)
    assert settings.policy_settings == {"gain": "none"} and settings.skip == {"prefill": 0.5}


def test_policies_that_decide_by_the_batch_are_refused() -> None:
    for name in ("ace", "gsp", "rcr", "share", "top_p"):
        check_policy(make(name))
    for name in ("oea", "xshare", "pesf", "oracle"):
        with pytest.raises(BudgetError, match=f"{name}' cannot be served"):
            check_policy(make(name))
