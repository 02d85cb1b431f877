"""Values times factors: FP8 by block, channel or tensor, MXFP8, and int8 of compressed-tensors.

    W = (w − z) · s        s, and z where there is one, spread over the rows and columns that share it

The factor is multiplied, also where its name ends in `_inv`. How many rows and columns share one is told by its shape:
one number; [n] or [n, 1]: one for each row; [n, k/g]: groups of a row; a grid: blocks, whose size is in the configuration,
else 128 × 128. The last block of a grid may be ragged. Factors that are bytes are exponents (E8M0).

Names: `weight` + `weight_scale_inv` (DeepSeek, Qwen, MiniMax), `weight_scale` (compressed-tensors, ModelOpt), `scale`
(DeepSeek-V4), `qscale_weight` (Mistral); fused parameters put `_scale_inv`, `_weight_scale` behind their own name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .stored import FLOATS, Facts, Headers, Stored, beside, number, unreadable, up

SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight")
VALUES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "I8": "int8"}
USUAL = (128, 128)
Pair = tuple[int, int]


def find(key: str, headers: Headers, facts: Facts) -> Stored | None:
    weight, scale = headers[key], beside(key, headers, *SCALES)
    kind = VALUES.get(weight.dtype)
    if kind is None or scale is None or len(weight.shape) not in (2, 3):
        return None
    factors = headers[scale]
    exponents = factors.dtype in ("U8", "F8_E8M0")
    if not (factors.dtype in FLOATS or (exponents and kind == "fp8")):
        return None
    sharing = _sharing(key, weight.shape, factors.shape, facts)
    if sharing is None:
        return unreadable(
            key, key, weight, f"with {scale} {factors}: how many rows and columns share a factor is unclear"
        )
    zero = beside(key, headers, "weight_zero_point")
    keys = (key, scale) if zero is None else (key, scale, zero)
    stacked, each = len(weight.shape) == 3, math.prod(factors.shape) > 1
    return Stored(
        key,
        "mxfp8" if exponents and sharing.block == (1, 32) else f"{kind} {sharing.said(*weight.shape[-2:])}",
        keys,
        partial(decode, sharing=sharing),
        weight.shape[0] if stacked else None,
        frozenset() if each else frozenset(keys[1:]),
    )


@dataclass(frozen=True)
class Sharing:
    """A matrix's factors are a grid, each for a block of (rows, columns). `halves`: the gate and the up half of a fused
    matrix have a grid each, whose last blocks are ragged on their own."""

    grid: Pair
    block: Pair
    halves: bool

    def said(self, n: int, k: int) -> str:
        """Name what shares a factor."""
        if self.block[0] >= n and self.block[1] >= k:
            return "per tensor"
        return "per channel" if self.block == (1, k) else "by group" if self.block[0] == 1 else "by block"

    def spread(self, factors: Tensor, n: int, k: int) -> Tensor:
        """Repeat factors: one for each of n × k values."""
        if not self.halves:
            return up(up(factors.reshape(self.grid), self.block[0], 0, n), self.block[1], 1, k)
        whole = replace(self, grid=(self.grid[0] // 2, self.grid[1]), halves=False)
        return torch.cat([whole.spread(half, n // 2, k) for half in factors.chunk(2)])


def _sharing(key: str, weight: tuple[int, ...], scale: tuple[int, ...], facts: Facts) -> Sharing | None:
    """Tell which values share a factor by the shapes of both; None where that is unclear."""
    stacked = len(weight) == 3
    if stacked and math.prod(scale) > 1:
        if scale[0] != weight[0]:
            return None
        scale = scale[1:]
    n, k = weight[-2:]
    fused = stacked and "gate_up" in key.rpartition(".")[2] and n % 2 == 0
    grid = _grid(scale, n, k, stacked, fused)
    return None if grid is None else _blocks(grid, n, k, fused, facts)


def _grid(shape: tuple[int, ...], n: int, k: int, stacked: bool, fused: bool) -> Pair | None:
    """Read a matrix's factors as rows × columns; None where a shape can be read in two ways."""
    shape = tuple(a for a in shape if a != 1) if len(shape) == 4 else shape  # [R, 1, C, 1]
    if math.prod(shape) == 1:
        return (1, 1)
    if len(shape) == 2:
        return (shape[0], shape[1])
    if len(shape) != 1 or (stacked and n == k):
        return None
    if shape[0] == n:
        return (n, 1)
    return (1, k) if stacked and shape[0] == k else (2, 1) if fused and shape[0] == 2 else None


def _blocks(grid: Pair, n: int, k: int, fused: bool, facts: Facts) -> Sharing | None:
    """Find the one block size that makes this grid of a matrix [n, k]."""
    simple = {(1, 1): (n, k), (n, 1): (1, k), (1, k): (n, 1)}
    if grid in simple:
        return Sharing(grid, simple[grid], False)
    sizes = [*facts.all("weight_block_size"), *facts.all("block_structure")]
    pairs = [(int(b[0]), int(b[1])) for b in sizes if isinstance(b, list | tuple) and len(b) == 2]
    blocks = {(min(b[0], n), min(b[1], k)) for b in pairs or [USUAL]}
    fitting = [s for block in blocks for s in _fits(grid, n, k, block, fused)]
    if not fitting and grid[0] == n and k % grid[1] == 0:
        fitting = [Sharing(grid, (1, k // grid[1]), False)]
    if not fitting and fused and grid == (2, 1):
        fitting = [Sharing(grid, (n // 2, k), False)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(grid: Pair, n: int, k: int, block: Pair, fused: bool) -> list[Sharing]:
    """Try a block size; where the halves of a fused matrix are ragged, each may have a grid of its own."""
    if -(-k // block[1]) != grid[1]:
        return []
    if fused and (n // 2) % block[0] and grid[0] == 2 * -(-(n // 2) // block[0]):
        return [Sharing(grid, block, True)]
    return [Sharing(grid, block, False)] if -(-n // block[0]) == grid[0] else []


def decode(weight: Tensor, scale: Tensor, zero: Tensor | None = None, *, sharing: Sharing) -> Tensor:
    """[n, k] in fp32."""
    values = weight.float()
    if zero is not None:
        values = values - sharing.spread(zero.float(), *weight.shape)
    return values * sharing.spread(number(scale), *weight.shape)
