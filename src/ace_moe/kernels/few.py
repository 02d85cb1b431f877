"""Products of few tokens with up to four matrices as one torch operator, with the norm before and the sum after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
from torch import Tensor

from .few_kernel import few as kernel
from .launch import early_start

MOST = 4  # tokens, and matrices
DEEPEST = 8192  # columns
WIDE = 256  # columns of a tile: a warp reads whole rows of it, and sums over none but its own
HELD = 16384  # weights of a program, all in flight at once
PROGRAMS = 132  # worth having: one for each multiprocessor


def height(rows: int, columns: int) -> int:
    """Rows of a program: as many as it can hold, whole, and the grid can spare."""
    most = min(8, triton.next_power_of_2(max(1, HELD // columns)))
    while most > 1 and triton.cdiv(rows, most) < PROGRAMS:
        most //= 2
    return most


@torch.library.custom_op("ace_moe::few", mutates_args=())
def few(
    x: Tensor,
    weights: Sequence[Tensor],
    scale: Tensor | None = None,
    eps: float = 0.0,
    plus: bool = False,
    keep: bool = False,
    add: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K], weights of [n, K] → norm(x) times all of them [M, Σ n], plus `add`; and norm(x) [M, K], if asked to keep it.

    With `plus` the norm's scale is 1 + `scale`.
    """
    x = x.contiguous()
    (tokens, columns), rows = x.shape, [w.shape[0] for w in weights]
    y = x.new_empty(tokens, sum(rows))
    normed = x.new_empty(tokens, columns) if keep else x.new_empty(0)
    high = height(sum(rows), columns)
    *starts, grid = accumulate(triton.cdiv(n, high) for n in rows)
    matrices, unused = [w.contiguous() for w in weights], MOST - len(rows)
    kernel[(grid,)](
        x, x if scale is None else scale, x if add is None else add.contiguous(), *matrices, *[matrices[0]] * unused, y,
        normed, *starts, *[grid] * unused, *rows, *[0] * unused, columns, eps, x.stride(0), M=tokens, BN=high, BK=WIDE,
        STEPS=triton.cdiv(columns, WIDE), NORM=scale is not None, PLUS=plus, KEEP=keep, ADD=add is not None,
        num_warps=min(4, high), **early_start(x.device),
    )  # fmt: skip
    return y, normed


@few.register_fake
def _(x, weights, scale=None, eps=0.0, plus=False, keep=False, add=None):
    return x.new_empty(x.shape[0], sum(w.shape[0] for w in weights)), torch.empty_like(x) if keep else x.new_empty(0)
