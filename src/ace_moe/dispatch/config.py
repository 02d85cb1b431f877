"""Tile sizes by number of tokens. Found by measuring; any entry is correct, some are faster."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Rows, columns and depth of a tile in the up and the down product, with warps and pipeline stages."""

    bm: int
    bn_up: int
    bk_up: int
    warps_up: int
    stages_up: int
    bn_down: int
    bk_down: int
    warps_down: int
    stages_down: int


def few_tiles(tokens: int, d: int, m: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(0, 16, 32, 4, 2, 16, 32, 4, 2)
    return Tiles(0, 16, 256, 4, 4, 16, 256, 4, 4)


def many_tiles(slots_per_expert: int, d: int, m: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 4, 2, 32, 32, 4, 2)
    if slots_per_expert <= 16:
        return Tiles(16, 32, 128, 4, 4, 64, 128, 4, 4)
    if slots_per_expert <= 64:
        return Tiles(64, 64, 64, 4, 4, 128, 64, 4, 4)
    return Tiles(128, 64, 64, 8, 4, 128, 64, 8, 4)
