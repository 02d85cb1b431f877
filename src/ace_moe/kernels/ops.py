"""The experts as a torch operator: opaque to torch.compile, safe in CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import IntegrationError
from . import experts
from .activation import Activation
from .layout import Near


@torch.library.custom_op("ace_moe::experts", mutates_args=())
def run_experts(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    gated: bool,
    interleaved: bool,
    transposed: bool,
    kind: int,
    alpha: float,
    limit: float,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    block_rows: int = 1,
    block_columns: int = 0,
    near_row: Tensor | None = None,
    near_in: Tensor | None = None,
    near_out: Tensor | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """Run the experts: x [T, d], ids and gates [T, k] → y [T, d]; slots whose id is no expert are not run.

    s_in, s_out are FP8 factors, one for each block of rows and columns; near_… the `Near` of weights in host memory;
    `add` [T, d] is what else becomes part of y.
    """
    block = (block_rows, block_columns) if s_in is not None else None
    layout = experts.Layout(gated, interleaved, transposed, Activation(kind, alpha, limit), block)
    near = None if near_row is None or near_in is None or near_out is None else Near(near_row, near_in, near_out)
    weights = experts.Weights(w_in, w_out, b_in, b_out, layout, s_in, s_out, near)
    return experts.run(x, ids, gates, weights, add)


@run_experts.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)  # contiguous, whatever the tokens are


def _backward(ctx, *_):
    raise IntegrationError(
        "The kernels have no backward pass. Detach the plan to train (`ace.detach()`); for gradients of a model in evaluation "
        'mode attach it with `dispatch="torch"`.'
    )


run_experts.register_autograd(_backward)
