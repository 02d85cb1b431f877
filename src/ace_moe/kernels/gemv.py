"""One token times up to four matrices as one torch operator, with the norm before and the sum after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .gemv_kernel import gemv as kernel
from .launch import cdiv, early_start, power_of_two

MOST = 4  # matrices
DEEPEST = 8192  # columns
WIDE = 2048  # columns of a tile
HELD = 8192  # weights of a program, all in flight at once: with more, its registers leave room for too few programs
PROGRAMS = 132  # worth having: one for each multiprocessor


def tile(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, columns, number) of a program's tiles: all columns of as many rows as it can hold and the grid can spare."""
    width = min(WIDE, power_of_two(columns))
    steps, height = cdiv(columns, width), 1
    while height * 2 * width * steps <= HELD and cdiv(rows, height * 2) >= PROGRAMS:
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
    """x [1, K], weights of [n, K] → norm(x) times all of them [1, Σ n], plus `add`; and norm(x) [1, K], if asked to keep it.

    With `plus` the norm's scale is 1 + `scale`; with `rounded` x is rounded before it is scaled.
    """
    x, rows, columns = x.contiguous(), [w.shape[0] for w in weights], x.shape[1]
    y, normed = x.new_empty(1, sum(rows)), x.new_empty(1, columns) if keep else x.new_empty(0)
    height, width, steps = tile(sum(rows), columns)
    *starts, grid = accumulate(cdiv(n, height) for n in rows)
    matrices, unused = [w.contiguous() for w in weights], MOST - len(rows)
    kernel[(grid,)](
        x, x if scale is None else scale, x if add is None else add.contiguous(), *matrices, *[matrices[0]] * unused, y,
        normed, *starts, *[grid] * unused, *rows, *[0] * unused, columns, eps, BN=height, BK=width, STEPS=steps,
        NORM=scale is not None, PLUS=plus, ROUNDED=rounded, KEEP=keep, ADD=add is not None, num_warps=4,
        **early_start(x.device),
    )  # fmt: skip
    return y, normed


@gemv.register_fake
def _(x, weights, scale=None, eps=0.0, plus=False, rounded=False, keep=False, add=None):
    return x.new_empty(1, sum(w.shape[0] for w in weights)), torch.empty_like(x) if keep else x.new_empty(0)
