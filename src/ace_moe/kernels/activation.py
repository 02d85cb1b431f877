"""Which activation an experts module has, found by trying it: the kernels compute only what they can reproduce."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

SILU, GELU_TANH, RELU_SQUARED, SWIGLU_OAI = range(4)


class Activation(NamedTuple):
    """What happens between the two products. `limit` clamps gate from above and up on both sides; 0 means no clamp."""

    kind: int
    alpha: float = 1.0
    limit: float = 0.0


def reference(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Compute what the kernels do, in torch: gate and up [.., m] → [.., m]; up is None for experts without a gate."""
    kind, alpha, limit = activation
    if up is None:
        return torch.relu(gate).square()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == SWIGLU_OAI:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return (nn.functional.silu(gate) if kind == SILU else nn.functional.gelu(gate, approximate="tanh")) * up


def recognise(module: nn.Module) -> Activation | None:
    """Find the activation whose arithmetic equals the module's on a grid of small and large values, or None."""
    grid = torch.linspace(-12, 12, 97, dtype=torch.float32)
    gate, up = torch.meshgrid(grid, grid, indexing="ij")
    gate, up = gate.reshape(1, -1), up.reshape(1, -1)
    if not module.has_gate:
        candidate = Activation(RELU_SQUARED)
        return candidate if _agree(module.act_fn(gate), reference(candidate, gate, None)) else None  # type: ignore[operator]
    fused = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    result = module._apply_gate(fused)  # type: ignore[operator]
    settings = (getattr(module, name, None) for name in ("limit", "swiglu_limit"))
    limits = {0.0, *(float(limit) for limit in settings if isinstance(limit, (int, float)))}
    alpha = float(getattr(module, "alpha", None) or getattr(module, "swiglu_alpha", None) or 1.702)
    for limit in sorted(limits):
        for kind, factor in ((SILU, 1.0), (GELU_TANH, 1.0), (SWIGLU_OAI, alpha)):
            candidate = Activation(kind, factor, limit)
            if _agree(result, reference(candidate, gate, up)):
                return candidate
    return None


def _agree(result: Tensor, expected: Tensor) -> bool:
    return result.shape == expected.shape and torch.allclose(result.float(), expected, rtol=1e-5, atol=1e-5)
