"""Stand-ins for what vLLM gives the plugin, for the tests of its parts that need no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ace_moe.decider import Decider, Part
from ace_moe.decider.state import State
from ace_moe.demo import MODEL
from ace_moe.engines.vllm.skipping import SKIPPED
from ace_moe.engines.vllm.steps import Step, TokenClasses
from ace_moe.policies import make

EXPERTS, TOP_K = 16, 6
FOUND = {"experts": 32, "top_k": 8, "hidden": 192, "intermediate": 48}


def step(lengths: list[int], computed: Any = 0, prompts: Any = 0, drafts: Any = None) -> Step:
    """Numbers stand for the same of every request; without prompts all tokens were generated."""
    given = [np.broadcast_to(np.asarray(v, dtype=np.int32), len(lengths)) for v in (computed, prompts)]
    return Step(np.array(lengths, dtype=np.int32), *given, None if drafts is None else np.array(drafts, dtype=np.int32))


def layer(
    policy: str = "ace", taus: tuple[float, float] = (0.1, 0.18), step: Step | None = None, kernels: bool = False,
    device: str = "cpu", **settings: Any,
) -> Decider:  # fmt: skip
    """A layer as vLLM's integration makes it, with the classes of a step (none: all padding); τ for prefill and decode."""
    generator = torch.Generator().manual_seed(0)
    tables = {name: torch.rand(EXPERTS, generator=generator) + 0.5 for name in ("gsp", "rcr")}
    state, classes = State(), TokenClasses(512, device)
    state.set(torch.tensor([0.0, *taus, taus[1]]))
    if step is not None:
        classes.mark(step)
    options = {"device": device, "kernels": kernels, "opaque": False, "tokens": classes, "skipped": SKIPPED}
    return Decider("0", make(policy, **settings), tables, state, experts=EXPERTS, **options)


def routing(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """ids, gates [T, k] as vLLM's router gives them: int32 and fp32."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1)
    gates, ids = scores.topk(TOP_K)
    return ids.int(), gates / gates.sum(-1, keepdim=True)


def experts(kernel: str, prepare: str = "MoEPrepareAndFinalizeNoDPEPModular", device: str = "cuda", **more: Any) -> Any:
    """A stand-in for a RoutedExperts module whose kernel has this class name."""
    settings = {
        "quant_dtype": None, "a2_scale": None, "block_shape": None, "per_act_token_quant": False, "_lora_context": None,
        "w1_scale": None, "w2_scale": None, **more.pop("kernel_settings", {}),
    }  # fmt: skip
    fused = type(kernel, (), settings)()
    made = type(prepare, (), more.pop("prepare_settings", {}))()
    method = SimpleNamespace(
        moe_kernel=SimpleNamespace(fused_experts=fused, prepare_finalize=made), is_monolithic=False
    )
    config = SimpleNamespace(device=device, has_bias=False, num_experts=EXPERTS)
    given = {
        "expert_map": None,
        "activation": SimpleNamespace(value="silu"),
        "apply_router_weight_on_input": False,
        **more,
    }
    return SimpleNamespace(quant_method=method, moe_config=config, layer_name="model.layers.0.mlp.experts", **given)


def runner(module: Any, gathered: bool = False) -> Any:
    return SimpleNamespace(routed_experts=module, do_naive_dispatch_combine=gathered, layer_name=module.layer_name)


def reply(rank: int, split: bool = False, data: int = 0) -> dict[str, Any]:
    """A worker's answer: rows are padding, prefill, decode, verify."""
    counts = {"2": [[0] * 3, [80, 40, 0], [16, 4, 0], [0] * 3], "10": [[0] * 3, [80, 80, 0], [16, 16, 0], [0] * 3]}
    part = Part(
        counts, [0.0, 0.1, 0.2, 0.2], 0.5, {"2": "native", "10": "native"}, {"2": {"kernels": "switched off"}},
        tensor_rank=rank, data_rank=data, split=split,
    )  # fmt: skip
    return part.to_json()


def vllm_config(plan: Path, **ace: Any) -> Any:
    """A stand-in with what the plugin reads of vLLM's configuration."""
    model = SimpleNamespace(model=str(MODEL), hf_text_config=SimpleNamespace(num_hidden_layers=6))
    return SimpleNamespace(
        additional_config={"ace": {"plan": str(plan), **ace}, "other": 1}, model_config=model, lora_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), device_config=SimpleNamespace(device="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )  # fmt: skip
