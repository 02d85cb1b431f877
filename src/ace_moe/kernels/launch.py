"""Where kernels are launched and how they follow one another: from Hopper on one may start before the one in front has ended,
and waits on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from . import usable


def cdiv(a: int, b: int) -> int:
    """Divide and round up. Triton's own is made for kernels and slow outside of them: a prompt's layers wait for the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


HERE = nullcontext()
ROOM = 232448  # bytes


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: Triton launches there, and layers of a model that is spread out are on others."""
    if device.type != "cuda" or _alone() or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


@cache
def _alone() -> bool:
    return torch.cuda.device_count() < 2


@cache
def hopper(device: torch.device) -> bool:
    """Look whether kernels may start early."""
    return usable(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def roomy(device: torch.device) -> bool:
    """Look whether a program also has Hopper's shared memory: on Blackwell cards for desktops it has less than half of it."""
    properties: Any = torch.cuda.get_device_properties(device) if hopper(device) else None
    return getattr(properties, "shared_memory_per_block_optin", 0) >= ROOM


def early_start(device: torch.device) -> dict[str, bool]:
    """Return launch options of kernels that know how to wait for the one in front."""
    return {"EARLY": True, "launch_pdl": True} if hopper(device) else {"EARLY": False}


@triton.jit
def take_turn(EARLY: tl.constexpr) -> None:
    """Wait until all the kernel in front has written can be read; let the one behind start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
