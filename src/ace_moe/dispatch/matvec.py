"""Dense products of very few tokens as a torch operator."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .experts import early_start
from .matvec_kernel import matvec as kernel

MOST_COLUMNS = 8192  # a row is held in registers


@torch.library.custom_op("ace_moe::matvec", mutates_args=())
def matvec(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K], weight [N, K], bias [N] → [M, N]."""
    (tokens, width), rows = x.shape, weight.shape[0]
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(rows, 2),)](
        x, weight, weight if bias is None else bias, y, rows, width, x.stride(0), M=tokens, BN=2,
        BK=triton.next_power_of_2(width), BIAS=bias is not None, num_warps=8, **early_start(x.device),
    )  # fmt: skip
    return y


@matvec.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])
