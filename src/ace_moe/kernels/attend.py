"""The decode attention as torch operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attend_kernel import attend as kernel
from .launch import cdiv, early_start, on, power_of_two

PAIRS = 4096  # sequences × key heads that one workspace serves
MOST_SPLITS = 40
TILE = 64  # positions


def workspace(device: torch.device) -> Tensor:
    """Make the arrival counters `attend` needs; zero before and after every call, so all layers share them."""
    return torch.zeros(PAIRS, dtype=torch.int32, device=device)


def split(positions: int, pairs: int, row: int = 256) -> tuple[int, int, int]:
    """Divide into (programs per key head, positions for each, positions of a tile): about two programs for each of 132
    multiprocessors.

    A program that can fetches all it has to read at once; `row` are the bytes of a position.
    """
    unit = TILE if row <= 512 else TILE // 2  # wide heads in fp32, for the shared memory of RTX cards
    splits = max(1, min(MOST_SPLITS, cdiv(264, pairs), cdiv(positions, unit)))
    step = cdiv(cdiv(positions, splits), unit) * unit
    tile = 2 * TILE if step > TILE and row <= 256 else unit
    step = cdiv(step, tile) * tile
    return cdiv(positions, step), step, tile


@torch.library.custom_op("ace_moe::attend", mutates_args=())  # `arrived` is zero before and after
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, arrived: Tensor, scale: float) -> Tensor:
    """Attend: q [B, H·G, 1, D], k and v [B, H, S, D], mask [B, 1, 1, S] bool → [B, 1, H·G, D]."""
    token = [q] * 7, [0] * 3, {"TOKEN": False, "NORM": False, "PLUS": False, "ROUNDED": False}
    return _launch(q, q.shape[1], q.stride(1), k, v, mask, arrived, scale, 0.0, *token)


@torch.library.custom_op("ace_moe::attend_token", mutates_args=("keys", "values"))
def attend_token(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, place: Tensor,
    mask: Tensor | None, arrived: Tensor, scale: float, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    eps: float = 0.0, plus: bool = False, rounded: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with the token's own q [B, H·G·D], k and v [B, H·D] as their products gave them → [B, 1, H·G, D].

    Queries and keys are normed where they have scales [D] and turned by cos and sin [1 or B, 1, D]; key and value go to `place`
    [1] of the caches keys and values [B, H, S, D], which are then attended to.
    """
    q, k, v, cos, sin = (x.contiguous() for x in (q, k, v, cos, sin))
    scales = [q if x is None else x for x in (q_scale, k_scale)]
    steps = [k.stride(0), v.stride(0), 0 if cos.shape[0] == 1 else cos.stride(0)]
    kind = {"TOKEN": True, "NORM": q_scale is not None, "PLUS": plus, "ROUNDED": rounded}
    width = keys.shape[3]
    token = [k, v, *scales, cos, sin, place], steps, kind
    return _launch(q, q.shape[1] // width, width, keys, values, mask, arrived, scale, eps, *token)


def _launch(
    q: Tensor, queries: int, q_head: int, k: Tensor, v: Tensor, mask: Tensor | None, arrived: Tensor, scale: float,
    eps: float, token: list[Tensor], steps: list[int], kind: dict[str, bool],
) -> Tensor:  # fmt: skip
    batch, heads, positions, width = k.shape
    group, pairs = queries // heads, batch * heads
    splits, step, tile = split(positions, pairs, width * k.element_size())
    parts = torch.empty(pairs, splits, group, width, dtype=torch.float32, device=q.device)
    tops, totals = (torch.empty(pairs, splits, group, dtype=torch.float32, device=q.device) for _ in range(2))
    y = torch.empty(batch, 1, queries, width, dtype=q.dtype, device=q.device)
    with on(q.device):
        kernel[(pairs, splits)](
            q, k, v, q if mask is None else mask, *token, parts, tops, totals, arrived, y, scale * math.log2(math.e), eps,
            positions, heads, step, q.stride(0), q_head, k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
            v.stride(2), 0 if mask is None else mask.stride(0), *steps, G=group, GP=max(16, power_of_two(group)),
            JP=power_of_two(group), D=width, DP=max(16, power_of_two(width)), BS=tile, SPLITS=splits, MASKED=mask is not None,
            SHORT=kind["TOKEN"] and step == tile, **kind, num_warps=8 if width >= 64 else 4, num_stages=2,
            **early_start(q.device),
        )  # fmt: skip
    return y


@attend.register_fake
def _(q, k, v, mask, arrived, scale):
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@attend_token.register_fake
def _(q, k, v, cos, sin, keys, values, place, mask, arrived, scale, *_, **__):
    return q.new_empty(q.shape[0], 1, q.shape[1] // keys.shape[3], keys.shape[3])
