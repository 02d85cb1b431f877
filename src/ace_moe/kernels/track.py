"""Launch what moves thresholds behind a step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import track_kernel
from .launch import on, power_of_two


@lru_cache(maxsize=8)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy addresses to the device, at the first call, which is never recorded: a graph cannot hold a copy from the host."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def launch_track(
    counts: list[Tensor],
    tau: Tensor,
    target: Tensor,
    seen: Tensor,
    width: int,
    rate: float,
    lowest: float,
    highest: float,
) -> None:
    """Move thresholds. counts: [R, 3] of every layer; τ, target [R]; seen [R, 2]. `width` slots a token has in all layers."""
    where = _addresses(tuple(c.data_ptr() for c in counts), tau.device)
    arguments = (tau, target, seen, len(counts), float(width), rate, lowest, highest)
    with on(tau.device):
        track_kernel.track[(len(tau),)](where, *arguments, LP=power_of_two(len(counts)), num_warps=1)
