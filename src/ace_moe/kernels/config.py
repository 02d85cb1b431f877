"""Tile sizes by number of tokens. Found by measuring; any entry is correct, some are faster."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .launch import power_of_two


class Tiles(NamedTuple):
    """Rows, columns and depth of a tile in the up and the down product, with warps and pipeline stages.

    `tail` is the height of the smaller tile for an expert's last slots.
    """

    bm: int
    bn_up: int
    bk_up: int
    warps_up: int
    stages_up: int
    bn_down: int
    bk_down: int
    warps_down: int
    stages_down: int
    tail: int = 0


def one_tiles(tokens: int, d: int, m: int, block: int = 0) -> Tiles:
    """A product per slot. Down takes `bm` of a token's slots at a time and fetches `stages` tiles ahead.

    `block`: columns per FP8 factor; a tile of the up product holds whole blocks, one of the down product a single one.
    """
    deep, wide = (1024, 1024) if tokens == 1 else (512, 256)
    deep, wide = min(deep, power_of_two(d)), min(wide, power_of_two(m))
    if block:
        deep, wide = max(block, deep), block
    return Tiles(2, 2, deep, 4, 1, 2, wide, 2, 2) if tokens == 1 else Tiles(4, 2, deep, 1, 1, 4, wide, 2, 2)


def many_tiles(slots_per_expert: int, d: int, m: int, dtype: torch.dtype, large: bool) -> Tiles:
    """`large`: the GPU has Hopper's shared memory; others get tiles that fit everywhere."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2, 32, 32, 4, 2, tail=16)
    if slots_per_expert <= 2:
        return Tiles(16, 32, 128, 4, 4 if large else 2, 64, 128, 4, 4 if large else 2, tail=16)
    if slots_per_expert <= 16:
        return Tiles(32, 64, 128, 4, 3 if large else 2, 64, 128, 4, 3 if large else 2, tail=16)
    if slots_per_expert <= 64 or not large:
        return Tiles(64, 64, 64, 4, 3, 128, 64, 4, 3, tail=16)
    return Tiles(128, 128, 64, 8, 4, 256, 64, 8, 4, tail=64)
