"""Our kernels behind vLLM's contract: up to four tokens two launches instead of align, products and sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.activation import SILU, Activation


class Kernels:
    """Unquantised gated SiLU experts in vLLM's Triton layout: w13 [E, 2m, d] gate then up, w2 [E, d, m]."""

    name = "kernels"

    def __init__(self, experts: Any):
        from ...kernels.experts import Layout

        self.experts = experts  # weights are read at each call: vLLM may replace the parameter objects
        self.layout = Layout(gated=True, interleaved=False, transposed=False, activation=Activation(SILU))

    @classmethod
    def of(cls, experts: Any, kernel: Any, measured: bool = False) -> Kernels | str:
        """The kernels for this layer, or why not; `measured`: only on GPUs where they were found to be faster than vLLM's."""
        try:
            from ...kernels.launch import hopper
        except ImportError:
            return "Triton is not installed"
        reason = unfit(experts, kernel)
        if not reason and measured and not hopper(experts.w2_weight.device):
            return "they were not measured on this GPU"
        return reason or cls(experts)

    def __call__(self, run: Any, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        """x [T, d], gates and ids [T, k] → [T, d]; ids outside [0, E) are not run."""
        from ...kernels.experts import Weights
        from ...kernels.experts import run as run_kept

        weights = Weights(self.experts.w13_weight, self.experts.w2_weight, None, None, self.layout)
        return run_kept(x, ids, gates, weights)


def unfit(experts: Any, kernel: Any) -> str:
    """Why the kernels cannot stand in for this layer's; empty if they can."""
    config = experts.moe_config
    w13, w2 = (getattr(experts, name, None) for name in ("w13_weight", "w2_weight"))
    prepare = type(getattr(experts.quant_method.moe_kernel, "prepare_finalize", None)).__name__
    reasons = (
        (
            type(kernel).__name__ != "TritonExperts",
            f"the back end is {type(kernel).__name__}, whose weights lie otherwise",
        ),
        (
            getattr(kernel, "quant_dtype", None) is not None or getattr(kernel, "w1_scale", None) is not None,
            "quantised",
        ),
        (w13 is None or w13.dtype not in (torch.bfloat16, torch.float16, torch.float32), "quantised weights"),
        (config.has_bias, "its experts have biases"),
        (str(getattr(experts.activation, "value", experts.activation)) != "silu", "its activation is not SiLU"),
        (getattr(experts, "swiglu_limit", None) is not None, "its activation is clamped"),
        (
            experts.expert_map is not None or prepare != "MoEPrepareAndFinalizeNoDPEPModular",
            "experts are spread over ranks",
        ),
        (experts.apply_router_weight_on_input, "gates are applied before the experts"),
        (w13 is not None and w2 is not None and w13.shape[1] != 2 * w2.shape[2], "its weights are padded"),
    )
    return next((why for wrong, why in reasons if wrong), "")
