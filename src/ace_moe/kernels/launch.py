"""Where kernels are launched and how they follow one another: from Hopper on one may start before the one in front has ended,
and waits on the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl

from . import usable

LARGE = 228 * 1024  # bytes


def cdiv(a: int, b: int) -> int:
    """Not Triton's, which is made for kernels and slow outside of them: a prompt's layers wait for the host."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, kernels go to this GPU: Triton takes the current one, and layers of a model may lie on several."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def hopper(device: torch.device) -> bool:
    """Whether kernels may start early."""
    return usable(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def roomy(device: torch.device) -> bool:
    """Whether a program has the shared memory that large tiles need: data centres' Hopper and Blackwell, no RTX card."""
    return hopper(device) and torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= LARGE


def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that know how to wait for the one in front."""
    return {"EARLY": True, "launch_pdl": True} if hopper(device) else {"EARLY": False}


@triton.jit
def take_turn(EARLY: tl.constexpr) -> None:
    """Wait until all the kernel in front has written can be read; let the one behind start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
