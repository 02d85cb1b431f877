"""Random slots: what any score must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Routing, TokenPolicy

WORD = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Random(TokenPolicy):
    """c_i uniform in [0, 1), [T, k]: a hash of the token's hidden state, the slot's expert and `seed`.

    A hash and not a generator, so that a token is decided by itself, again the same way, and inside a compiled graph.
    """

    name = "random"

    seed: int = 0

    def contribution(self, routing: Routing) -> Tensor:
        word = _mix(routing.ids.long() + 1 + self.seed * 7919) ^ _bits(routing.gates)
        if routing.hidden is not None:  # gates alone take few values in bf16
            for column in routing.hidden[:, :4].unbind(-1):
                word = _mix(word ^ _bits(column).unsqueeze(-1))
        return (_mix(word) >> 8).float() / (1 << 24)


def _bits(values: Tensor) -> Tensor:
    """The bit pattern of each value as a number of 32 bits in int64."""
    return values.float().view(torch.int32).long() & WORD


def _mix(word: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32 bits held in int64, whose products do not overflow."""
    word = word & WORD
    word = ((word ^ (word >> 16)) * 0x45D9F3B) & WORD
    word = ((word ^ (word >> 16)) * 0x45D9F3B) & WORD
    return word ^ (word >> 16)
