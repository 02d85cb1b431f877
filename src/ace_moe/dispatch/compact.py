"""Kept slots alone through a stock experts function, where shapes may follow the data: on the CPU.

The stock grouped product skips the arithmetic of skipped slots but still gathers, masks, scales and adds a row for each of
them, which on a CPU is half of its time. Here the kept slots become a problem of their own with one slot a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

SENTINELS = "_is_expert_parallel"  # transformers ≥ 5.18 masks sentinel rows only under this flag; older ones always do
Experts = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def applies(hidden: Tensor) -> bool:
    """A GPU would have to wait for the number of slots, and a compiler cannot know it."""
    return hidden.device.type == "cpu" and not torch.compiler.is_compiling()


def compact(stock: Experts, module: nn.Module, hidden: Tensor, ids: Tensor, gates: Tensor, sentinel: int) -> Tensor:
    """hidden [T, d], ids and gates [T, k] → [T, d]. With nothing skipped it is the stock function, to the last bit."""
    kept = ids < sentinel
    with _no_sentinels(module):
        if bool(kept.all()):
            return stock(module, hidden, ids, gates)
        return kept_alone(partial(stock, module), hidden, ids, gates, kept)


def kept_alone(run: Callable[..., Tensor], hidden: Tensor, ids: Tensor, gates: Tensor, kept: Tensor) -> Tensor:
    """`run(hidden, ids, gates)` on kept slots as tokens of one slot each, added up in fp32. Syncs with the host."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    token, slot = kept.nonzero(as_tuple=True)
    if len(token):
        parts = run(hidden[token], ids[token, slot].unsqueeze(1), gates[token, slot].unsqueeze(1))
        out.index_add_(0, token, parts.float())
    return out.to(hidden.dtype)


@contextmanager
def _no_sentinels(module: nn.Module) -> Iterator[None]:
    """The stock function need not mask rows of skipped slots where none are left."""
    before = getattr(module, SENTINELS, None)
    if before is None:  # transformers before 5.18 masks always
        yield
        return
    setattr(module, SENTINELS, False)
    try:
        yield
    finally:
        setattr(module, SENTINELS, before)
