"""Our kernels on vLLM's layout of weights: the sum over the kept slots, or a word on why they cannot run a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_parts import EXPERTS, experts, layer, routing, runner, step
from torch import Tensor
from torch.nn.functional import gelu, silu

from ace_moe.engines.vllm.executor import Experts
from ace_moe.engines.vllm.kernels import OurKernels, unfit
from ace_moe.engines.vllm.settings import Settings


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def unquantised(tokens: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    w13, w2 = (torch.randn(EXPERTS, *s, generator=generator) / 8 for s in ((64, 48), (48, 32)))
    module = experts("TritonExperts", device="cpu", w13_weight=w13, w2_weight=w2)
    ids, gates = layer(taus=(0.15, 0.15), step=step([1] * tokens)).decide(*routing(tokens))
    return module, torch.randn(tokens, 48, generator=generator), gates, ids


def dense(module: Any, x: Tensor, gates: Tensor, ids: Tensor, activation: Any) -> Tensor:
    """[T, d]: all experts of all tokens, then the kept slots summed."""
    gate, up = torch.einsum("eab,tb->tea", module.w13_weight, x).chunk(2, -1)
    every = torch.einsum("eab,teb->tea", module.w2_weight, activation(gate) * up)
    chosen = every.gather(1, ids.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, x.shape[1]))
    return (chosen * gates.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float32, 1e-4, 1e-5), (torch.float16, 1e-2, 2e-3)])
@pytest.mark.parametrize("activation", [silu, gelu_tanh])
@pytest.mark.long
def test_our_kernels_run_vllms_layout(
    tokens: int, dtype: torch.dtype, rtol: float, atol: float, activation: Any
) -> None:
    """Gate then up in w13 [E, 2m, d], w2 [E, d, m]; slots with id −1 are not run; gates stay fp32 as vLLM has them."""
    pytest.importorskip("triton", reason="the kernels run in Triton's interpreter")
    module, x, gates, ids = unquantised(tokens)
    module.activation.value = activation.__name__
    kernels = OurKernels.of(module, module.quant_method.moe_kernel.fused_experts)
    assert isinstance(kernels, OurKernels)
    expected = dense(module, x, gates, ids, activation)
    module.w13_weight, module.w2_weight = (w.to(dtype) for w in (module.w13_weight, module.w2_weight))
    found = kernels(None, x.to(dtype), gates, ids)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.long
def test_our_kernels_read_fp8_by_blocks(tokens: int) -> None:
    """Codes with a factor for 64 × 64: gate's rows of factors, then up's, as vLLM keeps them."""
    pytest.importorskip("triton", reason="the kernels run in Triton's interpreter")
    module, _, gates, ids = unquantised(tokens)
    generator = torch.Generator().manual_seed(4)
    codes = [torch.randn(EXPERTS, *s, generator=generator).to(torch.float8_e4m3fn) for s in ((128, 192), (192, 64))]
    factors = [torch.rand(EXPERTS, *s, generator=generator) / 8 + 0.01 for s in ((2, 3), (3, 1))]
    kernel = module.quant_method.moe_kernel.fused_experts
    kernel.quant_dtype, kernel.block_shape = torch.float8_e4m3fn, [64, 64]
    kernel.w1_scale, kernel.w2_scale = factors
    wide = [
        c.float() * f.repeat_interleave(64, 1).repeat_interleave(64, 2) for c, f in zip(codes, factors, strict=True)
    ]
    module.w13_weight, module.w2_weight = wide
    x = torch.randn(tokens, 192, generator=generator)
    expected = dense(module, x, gates, ids, silu)
    module.w13_weight, module.w2_weight = codes
    kernels = OurKernels.of(module, kernel)
    assert isinstance(kernels, OurKernels)
    torch.testing.assert_close(kernels(None, x, gates, ids), expected, rtol=1e-3, atol=1e-3)
    kernel.block_shape = [128, 128]  # half an expert would share a factor with nothing
    assert "quantised" in unfit(module, kernel)


def test_our_kernels_say_what_they_cannot_run() -> None:
    module, *_ = unquantised(1)
    kernel = module.quant_method.moe_kernel.fused_experts
    assert unfit(module, kernel) == ""
    for name, value in (("expert_map", torch.arange(4)), ("activation", "relu2"), ("swiglu_limit", 7.0)):
        changed = SimpleNamespace(**{**vars(module), name: value})
        assert unfit(changed, kernel)
    assert "back end" in unfit(module, object())


def test_fp8_is_ours_up_to_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them vLLM's own, which multiplies FP8 by FP8, was faster; asked for, ours run every step."""
    pytest.importorskip("triton", reason="without it the kernels say so first")
    monkeypatch.setattr("ace_moe.kernels.launch.hopper", lambda device: True)
    for block, auto, asked in (([64, 64], "native, kernels to 4 tokens", "kernels"), (None, "kernels", "kernels")):
        module, *_ = unquantised(1)
        kernel = module.quant_method.moe_kernel.fused_experts
        module.moe_config.device = "cuda"
        if block:
            module.w13_weight, module.w2_weight = (
                torch.zeros(EXPERTS, *s, dtype=torch.float8_e4m3fn) for s in ((128, 192), (192, 64))
            )
            kernel.quant_dtype, kernel.block_shape = torch.float8_e4m3fn, block
        for kernels, name in (("auto", auto), (True, asked)):
            own = Experts(runner(module), layer(), Settings(kernels=kernels))
            own.choose()
            assert str(own.decider.chosen) == name
    monkeypatch.setenv(
        "VLLM_BATCH_INVARIANT", "1"
    )  # steps of one size would run on other kernels than those of another
    own = Experts(runner(module), layer(), Settings(kernels="auto"))
    own.choose()
    assert str(own.decider.chosen) == "native"


def test_where_the_choice_is_ours_only_measured_gpus_get_them() -> None:
    pytest.importorskip("triton", reason="without it the kernels say so first")
    module, *_ = unquantised(1)
    found = OurKernels.of(module, module.quant_method.moe_kernel.fused_experts, measured=True)
    assert isinstance(found, str) and "not measured" in found
