"""Running only the kept slots: x [T, d], ids and gates [T, k] → y [T, d], with the Triton kernels.

Nothing syncs with the host, launches depend on shapes alone and workspaces are fixed, so a call can be captured in a
CUDA graph; which slots are skipped is decided on the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import many_kernel, one_kernel, sort_kernel
from .config import Tiles, many_tiles, one_tiles
from .launch import cdiv, early_start, on, power_of_two, roomy
from .layout import Layout, Weights

__all__ = ["ONE", "Layout", "Weights", "run"]

ONE = 4  # tokens up to which a product per slot is fastest
SORTED = 1024  # slots up to which one program sorts them
STAGED = 8  # slots per expert from which a layer in host memory is copied whole: tiles would read experts repeatedly
BULK: bool | None = None  # whether the copy engine fetches weights; None: where there is one
GRID = 65535  # programs a GPU takes in the second dimension
# whether few tokens run side by side, so that an expert two of them need is read once; None: where there are two
BESIDE: bool | None = None


def run(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights, add: Tensor | None = None) -> Tensor:
    """Run the experts of one layer, plus `add` [T, d]."""
    if x.shape[0] == 0:
        return torch.empty_like(x)
    if x.dtype != weights.w_in.dtype and weights.layout.block is None:  # autocast; FP8 weights are widened to any
        y = run(x.to(weights.w_in.dtype), ids, gates, weights).to(x.dtype)
        return y if add is None else y + add
    x, ids, gates = x.contiguous(), ids.contiguous(), gates.contiguous()
    add = None if add is None else add.contiguous()
    if weights.w_in.device != x.device and ids.numel() >= STAGED * weights.shape[0]:
        weights = _staged(weights, x.device)
    few = x.shape[0] <= ONE and not weights.layout.transposed  # transposed rows are not contiguous
    with on(x.device):
        return (_one if few else _many)(x, ids, gates, weights, add)


def _staged(weights: Weights, device: torch.device) -> Weights:
    """Copy a layer's weights to the GPU, where the next layer's will follow them."""
    w_in, w_out = (
        _scratch(product, w.shape, w.dtype, device).copy_(w, non_blocking=True)
        for product, w in (("up", weights.w_in), ("down", weights.w_out))
    )
    return replace(weights, w_in=w_in, w_out=w_out, near=None)


@lru_cache(maxsize=4)
def _scratch(product: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Experts without a gate that are as wide as the model have two products of one shape."""
    return torch.empty(shape, dtype=dtype, device=device)


def _near(weights: Weights, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (all experts' weights, where copies beside the GPU are, the copies), or stand-ins that are never read."""
    near = weights.near
    return (w, w, w) if near is None else (w, near.row, near.w_in if w is weights.w_in else near.w_out)


def _factors(s: Tensor | None, stand_in: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the FP8 factors with their strides, or a stand-in that is never read."""
    return (stand_in, 0, 0, 0) if s is None else (s, *s.stride())  # type: ignore[return-value]


def _quantised(weights: Weights) -> dict[str, int]:
    rows, columns = weights.layout.block or (1, 0)
    return {"QN": rows, "QK": columns}


def _up_options(weights: Weights, tiles: Tiles, d: int) -> dict[str, object]:
    layout = weights.layout
    return {
        "BN": tiles.bn_up, "BK": tiles.bk_up, "EVEN": d % tiles.bk_up == 0, "GATED": layout.gated,
        "INTERLEAVED": layout.interleaved, "BIAS": weights.b_in is not None, "KIND": layout.activation.kind,
        "ALPHA": layout.activation.alpha, "LIMIT": layout.activation.limit, **_quantised(weights),
        "num_warps": tiles.warps_up, "num_stages": tiles.stages_up,
    }  # fmt: skip


def _down_options(weights: Weights, tiles: Tiles, m: int) -> dict[str, object]:
    return {
        "BN": tiles.bn_down, "BK": tiles.bk_down, "EVEN": m % tiles.bk_down == 0, "BIAS": weights.b_out is not None,
        **_quantised(weights), "num_warps": tiles.warps_down, "num_stages": tiles.stages_down,
    }  # fmt: skip


def _one(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights, add: Tensor | None) -> Tensor:
    (tokens, k), (experts, d, m) = ids.shape, weights.shape
    tiles, early = one_tiles(tokens, d, m, weights.layout.block), early_start(x.device)
    h = torch.empty(tokens * k, m, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    b_in, b_out = _or(weights.b_in, x), _or(weights.b_out, x)
    s_in, *in_factors = _factors(weights.s_in, x)
    s_out, *out_factors = _factors(weights.s_out, x)
    beside, near = int(tokens > 1 if BESIDE is None else BESIDE), weights.near is not None
    up, down = (cdiv(m, tiles.bn_up), tokens * k), (cdiv(d, tiles.bn_down), tokens)
    one_kernel.one_up[up[::-1] if beside else up](
        x, ids, *_near(weights, weights.w_in), s_in, b_in, h, experts, d, m, x.stride(0),
        *weights.strides(weights.w_in), *in_factors, b_in.stride(0), TOP_K=k, BESIDE=beside, NEAR=near, **early,
        **_up_options(weights, tiles, d),
    )  # fmt: skip
    one_kernel.one_down[down[::-1] if beside else down](
        h, ids, gates, _or(add, x), *_near(weights, weights.w_out), s_out, b_out, y, experts, d, m,
        *weights.strides(weights.w_out), *out_factors,
        TOP_K=k, KP=power_of_two(k), KC=min(tiles.bm, power_of_two(k)), KSTEPS=cdiv(m, tiles.bk_down),
        AHEAD=tiles.stages_down, BESIDE=beside, NEAR=near, ADD=add is not None, **early,
        **_down_options(weights, tiles, m),
    )  # fmt: skip
    return y


def _many(x: Tensor, ids: Tensor, gates: Tensor, weights: Weights, add: Tensor | None) -> Tensor:
    (tokens, k), (experts, d, m) = ids.shape, weights.shape
    slots, large, early = tokens * k, roomy(x.device), early_start(x.device)
    tiles = many_tiles(slots // experts, d, m, x.dtype, large)
    if weights.columns:  # with FP8 factors a tile lies inside one block of columns
        tiles = tiles._replace(bk_up=min(tiles.bk_up, weights.columns), bk_down=min(tiles.bk_down, weights.columns))
    if tokens > 1 and cdiv(slots, tiles.bm) + experts + 3 > GRID:
        adds = (None, None) if add is None else add.chunk(2)
        halves = zip(x.chunk(2), ids.chunk(2), gates.chunk(2), adds, strict=True)
        return torch.cat([_many(*half[:3], weights, half[3]) for half in halves])
    where = _sorted(ids, experts, tiles.bm)
    h = torch.empty(slots, m, dtype=x.dtype, device=x.device)
    parts = torch.empty(slots, d, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    beside = weights.near is None and weights.w_in.device == x.device  # a descriptor knows one place
    bulk = (BULK if BULK is not None else large) and beside
    desc_in, desc_out = (
        _bulk(weights, w, shape) if bulk else None
        for w, shape in ((weights.w_in, (tiles.bn_up, tiles.bk_up)), (weights.w_out, (tiles.bn_down, tiles.bk_down)))
    )
    b_in, b_out = _or(weights.b_in, x), _or(weights.b_out, x)
    s_in, *in_factors = _factors(weights.s_in, x)
    s_out, *out_factors = _factors(weights.s_out, x)
    shared = {"BM": tiles.bm, "TAIL": tiles.tail, "NEAR": weights.near is not None, **early}
    many_kernel.many_up[(cdiv(m, tiles.bn_up), len(where[-1]))](
        x, *where, *_near(weights, weights.w_in), x if desc_in is None else desc_in, s_in, b_in, h, d, m, x.stride(0),
        *weights.strides(weights.w_in), *in_factors, b_in.stride(0), TOP_K=k, BULK=desc_in is not None, **shared,
        **_up_options(weights, tiles, d),
    )  # fmt: skip
    many_kernel.many_down[(cdiv(d, tiles.bn_down), len(where[-1]))](
        h, gates, *where, *_near(weights, weights.w_out), x if desc_out is None else desc_out, s_out, b_out, parts, d, m,
        *weights.strides(weights.w_out), *out_factors, BULK=desc_out is not None, **shared,
        **_down_options(weights, tiles, m),
    )  # fmt: skip
    width = min(1024, power_of_two(d))
    many_kernel.many_sum[(tokens, cdiv(d, width))](
        parts, ids, _or(add, x), y, experts, d, TOP_K=k, BN=width, ADD=add is not None, num_warps=4, **early,
    )  # fmt: skip
    return y


def _bulk(weights: Weights, w: Tensor, shape: tuple[int, int]) -> TensorDescriptor | None:
    """Describe w as [E · rows, columns], where its layout lets the copy engine read it."""
    layout = weights.layout
    plain = layout.block is None and not layout.transposed and not layout.interleaved and w.is_contiguous()
    if not plain or w.shape[2] * w.element_size() % 16 or w.data_ptr() % 16:
        return None
    return TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), list(shape))


def _sorted(ids: Tensor, experts: int, bm: int) -> tuple[Tensor, ...]:
    """Return kept slots in order of their expert, how many tiles of `bm` slots they make, each tile's expert, start and length."""
    slots, padded = ids.numel(), power_of_two(experts)
    tiles = min(slots, cdiv(slots, bm) + experts)
    sizes = [cdiv(n, 4) * 4 for n in (experts, slots, 1, tiles, tiles, tiles)]  # aligned: one compiled kernel
    counts, *where = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device).split(sizes)
    if slots <= SORTED:
        sort_kernel.sort[(1,)](
            ids, counts, *where, slots, experts, SP=power_of_two(slots), EP=padded, BM=bm, **early_start(ids.device)
        )
        return tuple(where)
    ranks, block = torch.empty(slots, dtype=torch.int32, device=ids.device), 512
    grid = (cdiv(slots, block),)
    sort_kernel.rank[grid](ids, counts.zero_(), ranks, slots, experts, BLOCK=block)
    sort_kernel.place[grid](ids, counts, ranks, *where, slots, experts, EP=padded, BM=bm, BLOCK=block)
    return tuple(where)


def _or(bias: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if bias is None else bias
