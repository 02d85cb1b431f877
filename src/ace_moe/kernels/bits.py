"""A step's kept slots as a bit matrix, by which triton_kernels route: one launch in place of six small ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .bits_kernel import pack
from .launch import cdiv, power_of_two

WORD = 32
ROWS = 32  # tokens of a program


def packed(ids: Tensor, gates: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pack ids, gates [T, k] with −1 at skipped slots → the ids as int16, gates as bf16 with −1 there, and [T, words] of bits."""
    (tokens, k), columns = ids.shape, cdiv(experts, WORD)
    short, scaled = torch.empty_like(ids, dtype=torch.int16), torch.empty_like(gates, dtype=torch.bfloat16)
    bits = torch.empty(tokens, columns, dtype=torch.uint32, device=ids.device)
    pack[(cdiv(tokens, ROWS),)](
        ids, gates, short, scaled, bits, tokens, COLUMNS=columns, K=k, KP=power_of_two(k), BM=ROWS
    )
    return short, scaled, bits
