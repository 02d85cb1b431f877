"""The decode attention as a torch operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attend_kernel import attend as kernel
from .launch import cdiv, early_start, power_of_two

PAIRS = 4096  # sequences × key heads that one workspace serves
MOST_SPLITS = 16


def workspace(device: torch.device) -> Tensor:
    """The arrival counters `attend` needs; zero before and after every call, so all layers share them."""
    return torch.zeros(PAIRS, dtype=torch.int32, device=device)


def split(positions: int, pairs: int) -> tuple[int, int]:
    """(programs per key head, positions for each): about two programs for each of 132 multiprocessors."""
    splits = max(1, min(MOST_SPLITS, cdiv(264, pairs), cdiv(positions, 64)))
    step = cdiv(cdiv(positions, splits), 64) * 64
    return cdiv(positions, step), step


@torch.library.custom_op("ace_moe::attend", mutates_args=())  # `arrived` is zero before and after
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arrived: Tensor, scale: float) -> Tensor:
    """q [B, H·G, 1, D], k and v [B, H, S, D], mask [B, 1, 1, S] bool → [B, 1, H·G, D]."""
    (batch, queries, _, width), (heads, positions) = q.shape, k.shape[1:3]
    group, pairs = queries // heads, batch * heads
    splits, step = split(positions, pairs)
    parts = torch.empty(pairs, splits, group, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(pairs, splits, group, dtype=torch.float32, device=q.device) for _ in range(2))
    y = torch.empty(batch, 1, queries, width, dtype=q.dtype, device=q.device)
    kernel[(pairs, splits)](
        q, k, v, q if mask is None else mask, parts, tops, totals, arrived, y, scale * math.log2(math.e), positions,
        heads, step, q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
        v.stride(2), 0 if mask is None else mask.stride(0), G=group, GP=max(16, power_of_two(group)), D=width,
        DP=max(16, power_of_two(width)), BS=64, SPLITS=splits, MASKED=mask is not None, num_warps=4,
        num_stages=2, **early_start(q.device),
    )  # fmt: skip
    return y


@attend.register_fake
def _(q, k, v, mask, arrived, scale):
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])
