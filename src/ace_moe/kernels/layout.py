"""How an experts module stores its weights, found on the module itself: what the kernels can read, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .activation import Activation, recognise


@dataclass(frozen=True)
class Layout:
    """How an experts module stores its projections: w_in [E, 2m or m, d], w_out [E, d, m], or both transposed.

    `block` is the (rows, columns) that share one factor in an FP8 weight; None for weights without factors.
    """

    gated: bool
    interleaved: bool
    transposed: bool
    activation: Activation
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Layout | str:
        """Find the module's layout, or why the kernels cannot run it."""
        if getattr(module, "has_post_expert_norm", False):
            return "a norm follows each expert"
        weight = module.gate_up_proj if module.has_gate else module.up_proj
        block: tuple[int, int] | None = None
        if weight.dtype == torch.float8_e4m3fn:
            block_or_why = _fp8_block(module)
            if isinstance(block_or_why, str):
                return block_or_why
            block = block_or_why
        elif weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"weights are {str(weight.dtype).removeprefix('torch.')}"
        activation = recognise(module)
        if activation is None:
            return "its activation is not one the kernels compute"
        concatenated, transposed = getattr(module, "is_concatenated", True), getattr(module, "is_transposed", False)
        return cls(bool(module.has_gate), not concatenated, bool(transposed), activation, block)


def _fp8_block(module: nn.Module) -> tuple[int, int] | str:
    """Find the block of an FP8 experts module whose factors the kernels can read, or why they cannot."""
    block, m = getattr(module, "block_size", None), module.down_proj.shape[2]  # type: ignore[index]
    if block is None:
        return "its FP8 weights have one factor per tensor"
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        return "its FP8 activations have fixed factors"
    rows, columns = int(block[0]), int(block[1])
    if columns not in (64, 128) or m % rows:
        return f"its FP8 factors are for blocks of {rows} × {columns} and its experts are {m} wide"
    return rows, columns


class Near(NamedTuple):
    """Copies of R experts beside the GPU, while the weights of all are in host memory."""

    row: Tensor  # [E] int32: where an expert's copy is, -1 where it has none
    w_in: Tensor  # [R, …]
    w_out: Tensor


@dataclass(frozen=True)
class Weights:
    """The tensors of one layer's experts, with strides (expert, row, column) in one orientation.

    The two products' weights may lie in pinned host memory; the kernels then read what they need over the bus.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    layout: Layout
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    near: Near | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, d, m."""
        first, second = self.w_out.shape[1:]
        return (self.w_out.shape[0], second, first) if self.layout.transposed else (self.w_out.shape[0], first, second)

    @property
    def columns(self) -> int:
        """Columns per FP8 factor, 0 where there are none."""
        return self.layout.block[1] if self.layout.block else 0

    def strides(self, w: Tensor) -> tuple[int, int, int]:
        e, a, b = w.stride()
        return (e, b, a) if self.layout.transposed else (e, a, b)
