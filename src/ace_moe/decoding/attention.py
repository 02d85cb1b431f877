"""An attention implementation named `ace_decode`: SDPA, with a kernel of our own where one token attends to a cache.

    model.set_attn_implementation("ace_decode")

Prompts, CPUs and what the kernel does not know (soft caps, sinks, position biases) go to transformers' SDPA as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

IMPLEMENTATION = "ace_decode"
DEVICES = ("cuda",)  # where the kernel runs
UNKNOWN = ("softcap", "s_aux", "position_bias")  # arguments that change the formula


WORKSPACES: dict[torch.device, Tensor] = {}  # not functools.cache, which a compiler looks through


def workspace(device: torch.device) -> Tensor:
    """Return the counters all layers on a device share; made outside of compiled code, or every layer would make its own."""
    if device not in WORKSPACES:
        from ..kernels.attend import workspace as make

        WORKSPACES[device] = make(device)
    return WORKSPACES[device]


def _one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Look whether this is one token on a cache, and all of it known to the kernel."""
    if query.device.type not in DEVICES or query.shape[2] != 1:
        return False
    if any(options.get(name) is not None for name in UNKNOWN):
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1 or mask.stride(-1) != 1):
        return False
    return key.shape[-1] == value.shape[-1] == query.shape[-1] <= 256 and key.stride(-1) == value.stride(-1) == 1


def forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, H·G, q, D], key and value [B, H, S, D] → [B, q, H·G, D]."""
    if not _one_token(query, key, value, attention_mask, options):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    from ..kernels.attend import attend

    scale = options.get("scaling") or query.shape[-1] ** -0.5
    return attend(query, key, value, attention_mask, workspace(query.device), scale), None


AttentionInterface.register(IMPLEMENTATION, forward)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
