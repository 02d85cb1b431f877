"""Stand-ins for what vLLM gives the plugin, for the tests of its parts that need no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ace_moe.demo import MODEL
from ace_moe.integrations.vllm.layer import Layer
from ace_moe.integrations.vllm.phases import Phases
from ace_moe.policies import make

EXPERTS, TOP_K = 16, 6
FOUND = {"experts": 32, "top_k": 8, "hidden": 192, "intermediate": 48}


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


def reply(rank: int, split: bool = False, data: int = 0) -> dict[str, Any]:
    return {
        "skip": 0.5, "thresholds": [0.1, 0.2], "counts": {"2": [[80, 40], [16, 4]], "10": [[80, 80], [16, 16]]},
        "executors": {"2": "native", "10": "native"}, "split": split, "tensor_rank": rank, "data_rank": data,
    }  # fmt: skip


def vllm_config(plan: Path, **ace: Any) -> Any:
    """A stand-in with what the plugin reads of vLLM's configuration."""
    model = SimpleNamespace(model=str(MODEL), hf_text_config=SimpleNamespace(num_hidden_layers=6))
    return SimpleNamespace(
        additional_config={"ace": {"plan": str(plan), **ace}, "other": 1}, model_config=model, lora_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), device_config=SimpleNamespace(device="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )  # fmt: skip
