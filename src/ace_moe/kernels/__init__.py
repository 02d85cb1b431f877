"""Triton code and what launches it: the rule, routing, sorting, the experts, decode attention."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

AMPERE = (8, 0)


def without_triton() -> str:
    """Say that Triton is missing; empty if it is there."""
    return "" if find_spec("triton") is not None else "Triton is not installed"


@cache
def foreign(device: torch.device) -> str:
    """Say why nothing here can run on this GPU; empty if it can, and for what is not a GPU."""
    if device.type != "cuda":
        return ""
    if torch.version.hip is not None:  # whose GPUs go by the same name
        return "the kernels were made for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < AMPERE:
        return "this GPU is older than those the kernels were made for (Ampere)"
    return without_triton()


def usable(device: torch.device) -> bool:
    """Look whether this is a GPU the kernels run on."""
    return device.type == "cuda" and not foreign(device)
