"""Our kernels behind vLLM's contract: up to four tokens two launches instead of align, products and sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import foreign, without_triton
from ...kernels.activation import GELU_TANH, SILU, Activation
from .backends import PLAIN, prepare_of
from .settings import EVERY, batch_invariant

ACTIVATIONS = {"silu": Activation(SILU), "gelu_tanh": Activation(GELU_TANH)}


class OurKernels:
    """Gated experts in vLLM's Triton layout: w13 [E, 2m, d] gate then up, w2 [E, d, m]; plain, or FP8 with a factor per block."""

    name = "kernels"

    def __init__(self, experts: Any, kernel: Any):
        from ...kernels.experts import ONE, Layout

        self.experts, self.kernel = experts, kernel  # weights are read at each call: vLLM may replace the parameters
        block = None if kernel.block_shape is None else (int(kernel.block_shape[0]), int(kernel.block_shape[1]))
        self.layout = Layout(True, False, False, ACTIVATIONS[activation_of(experts)], block)
        self.fastest = EVERY if block is None else ONE  # tokens of a step up to which they were found to be

    @classmethod
    def of(cls, experts: Any, kernel: Any, measured: bool = False) -> OurKernels | str:
        """The kernels for this layer, or why not; `measured`: only where they were found to be faster and do no harm."""
        if why := without_triton():
            return why
        from ...kernels.launch import hopper

        reason = unfit(experts, kernel) or foreign(experts.w2_weight.device)
        if not reason and measured and not hopper(experts.w2_weight.device):
            return "they were not measured on this GPU"
        if not reason and measured and batch_invariant():
            return "VLLM_BATCH_INVARIANT is set, and their order of sums depends on the batch"
        return reason or cls(experts, kernel)

    def __call__(self, run: Any, x: Tensor, gates: Tensor, ids: Tensor, **shared: Any) -> Tensor:
        """x [T, d], gates and ids [T, k] → [T, d]; ids outside [0, E) are not run."""
        from ...kernels.experts import Weights
        from ...kernels.experts import run as run_kept

        w13, w2 = self.experts.w13_weight, self.experts.w2_weight
        return run_kept(
            x, ids, gates, Weights(w13, w2, None, None, self.layout, self.kernel.w1_scale, self.kernel.w2_scale)
        )


def activation_of(experts: Any) -> str:
    return str(getattr(experts.activation, "value", experts.activation))


def unfit(experts: Any, kernel: Any) -> str:
    """Why the kernels cannot stand in for this layer's; empty if they can."""
    config = experts.moe_config
    if type(kernel).__name__ != "TritonExperts":
        return f"the back end is {type(kernel).__name__}, whose weights lie otherwise"
    w13, w2 = experts.w13_weight, experts.w2_weight
    reasons = (
        (_coded(kernel, w13, w2), "its weights are quantised, and not by blocks of FP8"),
        (config.has_bias, "its experts have biases"),
        (activation_of(experts) not in ACTIVATIONS, f"its activation is {activation_of(experts)}"),
        (getattr(experts, "swiglu_limit", None) is not None, "its activation is clamped"),
        (
            experts.expert_map is not None or type(prepare_of(experts)).__name__ != PLAIN,
            "experts are spread over ranks",
        ),
        (experts.apply_router_weight_on_input, "gates are applied before the experts"),
        (w13.shape[1] != 2 * w2.shape[2], "its weights are padded"),
    )
    return next((why for wrong, why in reasons if wrong), "")


def _coded(kernel: Any, w13: Tensor, w2: Tensor) -> bool:
    """Whether the weights are in a code the kernels do not read."""
    block = kernel.block_shape
    if block is None:
        return kernel.quant_dtype is not None or kernel.w1_scale is not None or w13.dtype.itemsize < 2
    return w13.dtype != torch.float8_e4m3fn or block[1] not in (64, 128) or bool(w2.shape[2] % block[0])
