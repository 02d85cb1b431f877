"""One token, or a few, times up to four matrices as one torch operator, with the norm before and the sum after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .gemv_kernel import gemv as kernel
from .launch import cdiv, early_start, hopper, on, power_of_two

MOST = 4  # matrices
FEW = 4  # tokens
DEEPEST = 8192  # columns
WIDE = 2048  # columns of a tile
PROGRAMS = 132  # worth having: one for each multiprocessor


class Room(NamedTuple):
    """What a program has: weights, all in flight at once; warps; registers of a thread, so that enough programs run at once."""

    held: int
    warps: int
    registers: int


def room(tokens: int, normed: int = 0) -> Room:
    """Return what a program has, as found by measuring. Several tokens are in registers beside the weights.

    `normed`: columns of tokens that are normed, which are all there at once. Where they are more than a tile's, there are as many
    more threads, by the machine code alone: four warps for four tokens of 2,816 columns spilt 142 registers.
    """
    if tokens == 1:
        return Room(16384, 8, 64)
    warps = 4 * power_of_two(cdiv(normed, WIDE))
    return Room(2048 * warps, warps, 128)


def tile(rows: int, columns: int, held: int) -> tuple[int, int, int]:
    """Return (rows, columns, number) of a program's tiles: all columns of as many rows as it can hold and the grid can spare."""
    width = min(WIDE, max(8, power_of_two(columns)))
    steps, height = cdiv(columns, width), 1
    while height * 2 * width * steps <= held and cdiv(rows, height * 2) >= PROGRAMS:
        height *= 2
    return height, width, steps


@torch.library.custom_op("ace_moe::gemv", mutates_args=())
def gemv(
    x: Tensor,
    weights: Sequence[Tensor],
    scale: Tensor | None = None,
    eps: float = 0.0,
    plus: bool = False,
    rounded: bool = False,
    keep: bool = False,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply: x [T, K], weights of [n, K] → norm(x) times each, [T, n] behind [T, n]; and norm(x) [T, K], if asked to keep it.

    `add`, which is like the result, is added. With `plus` the norm's scale is 1 + `scale`; with `rounded` x is rounded before
    it is scaled.
    """
    x, rows, (tokens, columns) = x.contiguous(), [w.shape[0] for w in weights], x.shape
    y, normed = x.new_empty(tokens * sum(rows)), x.new_empty(tokens, columns) if keep else x.new_empty(0)
    limits = room(tokens, 0 if scale is None else columns)
    height, width, steps = tile(sum(rows), columns, limits.held)
    *starts, grid = accumulate(cdiv(n, height) for n in rows)
    matrices, unused = [w.contiguous() for w in weights], MOST - len(rows)
    with on(x.device):
        kernel[(grid,)](
            x, x if scale is None else scale, x if add is None else add.contiguous(), *matrices, *[matrices[0]] * unused, y,
            normed, *starts, *[grid] * unused, *rows, *[0] * unused, columns, eps, T=tokens, BN=height, BK=width, STEPS=steps,
            NORM=scale is not None, PLUS=plus, ROUNDED=rounded, KEEP=keep, ADD=add is not None, num_warps=limits.warps,
            **({"maxnreg": limits.registers} if hopper(x.device) else {}), **early_start(x.device),
        )  # fmt: skip
    return y, normed


@gemv.register_fake
def _(x, weights, scale=None, eps=0.0, plus=False, rounded=False, keep=False, add=None):
    return x.new_empty(x.shape[0] * sum(w.shape[0] for w in weights)), x.new_empty(x.shape) if keep else x.new_empty(0)
