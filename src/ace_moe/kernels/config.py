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


def one_tiles(tokens: int, d: int, m: int, block: tuple[int, int] | None = None) -> Tiles:
    """A product per slot. Down takes `bm` of a token's slots at a time and fetches `stages` tiles ahead.

    `block`: rows and columns per FP8 factor. A tile's rows lie inside one block, and the columns of a down tile are one.
    """
    deep, wide = min(1024, max(8, power_of_two(d))), min(256, max(8, power_of_two(m)))
    if block is None:
        return Tiles(4, 8, deep, 8, 1, *((2, wide, 2, 3) if tokens == 1 else (4, wide, 2, 2)))
    rows, columns = block
    up, down = (8, 2) if tokens == 1 else (8, 8)
    if rows % (2 * up):
        up = down = 1
    return Tiles(4, up, deep, 8 if tokens == 1 else 4, 1, down, columns, 2, 6 if tokens == 1 else 2)


def many_tiles(slots_per_expert: int, d: int, m: int, dtype: torch.dtype, large: bool) -> Tiles:
    """`large`: the GPU is `roomy`; others get tiles that fit everywhere."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, 4, 2, 32, 32, 4, 2, tail=16)
    if slots_per_expert <= 2:
        return Tiles(16, 32, 128, 4, 4 if large else 2, 64, 128, 4, 4 if large else 2, tail=16)
    if slots_per_expert <= 16:
        return Tiles(32, 64, 128, 4, 3 if large else 2, 64, 128, 4, 3 if large else 2, tail=16)
    if slots_per_expert <= 64 or not large:
        return Tiles(64, 64, 64, 4, 3, 128, 64, 4, 3, tail=16)
    return Tiles(128, 128, 64, 8, 4, 256, 64, 8, 4, tail=64)
