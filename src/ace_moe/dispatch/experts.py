"""Running only the kept slots: x [T, d], ids and gates [T, k] → y [T, d], with the Triton kernels.

Nothing syncs with the host, launches depend on shapes alone and workspaces are fixed, so a call can be captured in a
CUDA graph; which slots are skipped is decided on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor, nn

from . import kernels
from .activation import Activation, recognise
from .config import Tiles, few_tiles, many_tiles, one_tiles

ONE = 4  # tokens up to which a product per slot is fastest
FEW = 16  # tokens up to which one program takes all slots of an expert along


@dataclass(frozen=True)
class Layout:
    """How an experts module stores its projections: w_in [E, 2m or m, d], w_out [E, d, m], or both transposed."""

    gated: bool
    interleaved: bool
    transposed: bool
    activation: Activation

    @classmethod
    def of(cls, module: nn.Module) -> Layout | str:
        """The module's layout, or why the kernels cannot run it."""
        if getattr(module, "has_post_expert_norm", False):
            return "a norm follows each expert"
        weight = module.gate_up_proj if module.has_gate else module.up_proj
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"weights are {str(weight.dtype).removeprefix('torch.')}"
        activation = recognise(module)
        if activation is None:
            return "its activation is not one the kernels compute"
        return cls(bool(module.has_gate), not module.is_concatenated, bool(module.is_transposed), activation)


@dataclass(frozen=True)
class Weights:
    """The tensors of one layer's experts, with strides (expert, row, column) in one orientation."""

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    layout: Layout

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, d, m."""
        first, second = self.w_out.shape[1:]
        return (self.w_out.shape[0], second, first) if self.layout.transposed else (self.w_out.shape[0], first, second)

    def strides(self, w: Tensor) -> tuple[int, int, int]:
        e, a, b = w.stride()
        return (e, b, a) if self.layout.transposed else (e, a, b)


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(n))


def run(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights, arrived: Tensor | None = None) -> Tensor:
    """The experts of one layer. `arrived` is a zeroed int32 workspace that calls for few tokens may share."""
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x, ids, gates = x.contiguous(), ids.contiguous(), gates.contiguous()
    if x.shape[0] <= ONE and not weights.layout.transposed:  # transposed rows are not contiguous
        return _one(x, ids, gates, weights)
    return _few(x, ids, gates, weights, arrived) if x.shape[0] <= FEW else _many(x, ids, gates, weights)


def arrivals(tokens: int, hidden: int, device: torch.device) -> Tensor:
    """A workspace for `run` that serves any call of at most `tokens` tokens."""
    return torch.zeros(tokens * triton.cdiv(hidden, 16), dtype=torch.int32, device=device)


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options: from Hopper on, a kernel may start before the one in front of it has ended."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def _up_options(weights: Weights, tiles: Tiles, d: int) -> dict[str, object]:
    layout = weights.layout
    return {
        "BN": tiles.bn_up, "BK": tiles.bk_up, "EVEN": d % tiles.bk_up == 0, "GATED": layout.gated,
        "INTERLEAVED": layout.interleaved, "BIAS": weights.b_in is not None, "KIND": layout.activation.kind,
        "ALPHA": layout.activation.alpha, "LIMIT": layout.activation.limit,
        "num_warps": tiles.warps_up, "num_stages": tiles.stages_up,
    }  # fmt: skip


def _down_options(weights: Weights, tiles: Tiles, m: int) -> dict[str, object]:
    return {
        "BN": tiles.bn_down, "BK": tiles.bk_down, "EVEN": m % tiles.bk_down == 0, "BIAS": weights.b_out is not None,
        "num_warps": tiles.warps_down, "num_stages": tiles.stages_down,
    }  # fmt: skip


def _one(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights) -> Tensor:
    (tokens, k), (experts, d, m) = ids.shape, weights.shape
    tiles, early = one_tiles(tokens, d, m), early_start(x.device)
    h = torch.empty(tokens * k, m, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    b_in, b_out = _or(weights.b_in, x), _or(weights.b_out, x)
    kernels.one_up[(triton.cdiv(m, tiles.bn_up), tokens * k)](
        x, ids, weights.w_in, b_in, h, experts, d, m, x.stride(0), *weights.strides(weights.w_in), b_in.stride(0),
        TOP_K=k, **early, **_up_options(weights, tiles, d),
    )  # fmt: skip
    kernels.one_down[(triton.cdiv(d, tiles.bn_down), tokens)](
        h, ids, gates, weights.w_out, b_out, y, experts, d, m, *weights.strides(weights.w_out),
        TOP_K=k, KP=power_of_two(k), **early, **_down_options(weights, tiles, m),
    )  # fmt: skip
    return y


def _few(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights, arrived: Tensor | None) -> Tensor:
    (tokens, k), (experts, d, m) = ids.shape, weights.shape
    slots, tiles = tokens * k, few_tiles(tokens, d, m, x.dtype)
    h = torch.empty(slots, m, dtype=x.dtype, device=x.device)
    partial = torch.empty(slots, d, dtype=torch.float32, device=x.device)
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    if arrived is None:
        arrived = arrivals(tokens, d, x.device)
    shared = {"TOP_K": k, "SP": power_of_two(slots), "BM": power_of_two(tokens, 16)}
    b_in, b_out = _or(weights.b_in, x), _or(weights.b_out, x)
    kernels.few_up[(triton.cdiv(m, tiles.bn_up), slots)](
        x, ids, weights.w_in, b_in, h, slots, experts, d, m, x.stride(0), *weights.strides(weights.w_in), b_in.stride(0),
        **shared, **_up_options(weights, tiles, d),
    )  # fmt: skip
    kernels.few_down[(triton.cdiv(d, tiles.bn_down), slots)](
        h, ids, gates, weights.w_out, b_out, partial, arrived, y, slots, experts, d, m, *weights.strides(weights.w_out),
        KP=power_of_two(k), **shared, **_down_options(weights, tiles, m),
    )  # fmt: skip
    return y


def _many(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights) -> Tensor:
    (tokens, k), (experts, d, m) = ids.shape, weights.shape
    slots, tiles = tokens * k, many_tiles(tokens * k // experts, d, m, x.dtype)
    counts, order, tile_expert, tile_start = _sorted(ids, experts, tiles.bm)
    h = torch.empty(slots, m, dtype=x.dtype, device=x.device)
    parts = torch.empty(slots, d, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    shared = {"EP": power_of_two(experts), "BM": tiles.bm}
    b_in, b_out = _or(weights.b_in, x), _or(weights.b_out, x)
    kernels.many_up[(triton.cdiv(m, tiles.bn_up), len(tile_expert))](
        x, counts, tile_expert, tile_start, order, weights.w_in, b_in, h, d, m, x.stride(0),
        *weights.strides(weights.w_in), b_in.stride(0), TOP_K=k, **shared, **_up_options(weights, tiles, d),
    )  # fmt: skip
    kernels.many_down[(triton.cdiv(d, tiles.bn_down), len(tile_expert))](
        h, gates, counts, tile_expert, tile_start, order, weights.w_out, b_out, parts, d, m,
        *weights.strides(weights.w_out), **shared, **_down_options(weights, tiles, m),
    )  # fmt: skip
    width = min(1024, power_of_two(d))
    kernels.many_sum[(triton.cdiv(d, width), tokens)](parts, ids, y, experts, d, TOP_K=k, BN=width, num_warps=4)
    return y


def _sorted(ids: Tensor, experts: int, bm: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts [E]; kept slots in order of their expert; for each tile of `bm` slots its expert and its start."""
    slots, device = ids.numel(), ids.device
    counts = torch.zeros(experts, dtype=torch.int32, device=device)
    rank, order = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
    block = 512
    grid = (triton.cdiv(slots, block),)
    kernels.many_rank[grid](ids, counts, rank, slots, experts, BLOCK=block)
    padded = power_of_two(experts)
    narrow = 64
    kernels.many_sort[(triton.cdiv(slots, narrow),)](ids, counts, rank, order, slots, experts, EP=padded, BLOCK=narrow)
    tiles = triton.cdiv(triton.cdiv(slots, bm) + experts, narrow) * narrow
    tile_expert, tile_start = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(2))
    kernels.many_tiles[(tiles // narrow,)](counts, tile_expert, tile_start, experts, EP=padded, BM=bm, BLOCK=narrow)
    return counts, order, tile_expert, tile_start


def _or(bias: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if bias is None else bias
