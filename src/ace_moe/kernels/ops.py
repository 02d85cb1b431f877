"""The kernels as torch operators: opaque to torch.compile, safe in CUDA graphs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..policies import Policy
from ..rule import GAINS
from . import experts, route_kernel, rule_kernel
from .activation import Activation
from .experts import power_of_two
from .launch import early_start

FUSIONS = ("max", "min", "mean")
SETTINGS = ("FUSION", "GAIN", "MIN_ACTIVE", "MIN_MASS", "SQUARED")  # the kernels' names for what `settings` returns


def settings(policy: Policy) -> tuple[int, int, int, float, bool]:
    """A policy as the rule kernel takes it."""
    fusion, gain = FUSIONS.index(getattr(policy, "fusion", "max")), GAINS.index(policy.gain)
    return fusion, gain, policy.min_active, policy.min_mass, getattr(policy, "squared", False)


@torch.library.custom_op("ace_moe::rule", mutates_args=("counts",))
def rule(
    ids: Tensor,
    gates: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    threshold: Tensor,
    token_mask: Tensor | None,
    counts: Tensor,
    experts: int,
    fusion: int,
    gain: int,
    min_active: int,
    min_mass: float,
    squared: bool = False,
) -> tuple[Tensor, Tensor]:
    """ids, gates [T, k] → the same for the dispatch, `experts` in place of skipped ids; counts [2] += routed, kept."""
    ids, gates = ids.contiguous(), gates.contiguous()
    (tokens, k), new_ids, new_gates = ids.shape, torch.empty_like(ids), torch.empty_like(gates)
    padded = power_of_two(k)
    block = max(1, min(64, 512 // padded))
    if tokens:
        rule_kernel.decide[(triton.cdiv(tokens, block),)](
            ids, gates, ids if first is None else first, ids if second is None else second, threshold,
            ids if token_mask is None else token_mask, counts, new_ids, new_gates, tokens, experts,
            K=k, KP=padded, BT=block, VIEWS=(first is not None) + (second is not None), FUSION=fusion, GAIN=gain,
            MIN_ACTIVE=min_active, MIN_MASS=min_mass, MASKED=token_mask is not None, SQUARED=squared,
            num_warps=1 if tokens < 8 else 4,
        )  # fmt: skip
    return new_ids, new_gates


@rule.register_fake
def _(ids, gates, *rest):
    return torch.empty_like(ids), torch.empty_like(gates)


@torch.library.custom_op("ace_moe::experts", mutates_args=())
def run_experts(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    gated: bool,
    interleaved: bool,
    transposed: bool,
    kind: int,
    alpha: float,
    limit: float,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    block_rows: int = 1,
    block_columns: int = 0,
) -> Tensor:
    """x [T, d], ids and gates [T, k] → y [T, d]; slots whose id is no expert are not run.

    s_in, s_out are FP8 factors, one for each block of rows and columns.
    """
    block = (block_rows, block_columns) if s_in is not None else None
    layout = experts.Layout(gated, interleaved, transposed, Activation(kind, alpha, limit), block)
    return experts.run(x, ids, gates, experts.Weights(w_in, w_out, b_in, b_out, layout, s_in, s_out))


@run_experts.register_fake
def _(x, *rest):
    return torch.empty_like(x)


@torch.library.custom_op("ace_moe::route", mutates_args=("counts",))
def route(
    logits: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    threshold: Tensor,
    token_mask: Tensor | None,
    counts: Tensor,
    top_k: int,
    sigmoid: bool,
    normalise: bool,
    dtype: torch.dtype,
    fusion: int,
    gain: int,
    min_active: int,
    min_mass: float,
    squared: bool = False,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] → ids (int64), gates [T, k] with the rule already applied; counts [2] += routed, kept."""
    tokens, count = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    gates = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    block = 1 if tokens <= 64 else 16
    route_kernel.route[(triton.cdiv(tokens, block),)](
        logits, ids if first is None else first, ids if second is None else second, threshold,
        ids if token_mask is None else token_mask, counts, ids, gates, tokens, count, logits.stride(0),
        K=top_k, KP=power_of_two(top_k), EP=power_of_two(count), BT=block, SIGMOID=sigmoid, NORMALISE=normalise,
        VIEWS=(first is not None) + (second is not None), FUSION=fusion, GAIN=gain, MIN_ACTIVE=min_active,
        MIN_MASS=min_mass, MASKED=token_mask is not None, SQUARED=squared, num_warps=1 if block == 1 else 4,
        **early_start(logits.device),
    )  # fmt: skip
    return ids, gates


@route.register_fake
def _(logits, first, second, threshold, token_mask, counts, top_k, sigmoid, normalise, dtype, *rest):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype)
