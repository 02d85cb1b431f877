"""Facts measured from a module's behaviour instead of its name: what does it multiply each component by?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

TOLERANCE = 1e-3  # relative; a norm's own ε costs 1e-6, a map that is not diagonal misses by orders of magnitude


def probe(d: int, seed: int) -> Tensor:
    """Make x [d] with mean 0 and RMS 1 and no component near 0, which RMSNorm and LayerNorm both leave as it is."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.5 + torch.rand(d, generator=generator, dtype=torch.float64)
    x[torch.randperm(d, generator=generator)[: d // 2]] *= -1
    for _ in range(3):  # shrinking towards mean 0 by scaling the two signs keeps every component away from 0
        positive, negative = x.clamp(min=0).sum(), -x.clamp(max=0).sum()
        x = torch.where(x > 0, x * (negative / positive).sqrt(), x * (positive / negative).sqrt())
    return (x / x.square().mean().sqrt()).float()


def diagonal(f: Callable[[Tensor], Tensor], d: int) -> Tensor | None:
    """Find s [d] with f(x) = s ∘ x + c on normalised x; None if f is not such a map."""
    if d < 2:
        return None
    xs = [probe(d, seed) for seed in (0, 1)]
    try:
        scales = [(f(x[None]) - f(-x[None])).reshape(-1) / (2 * x) for x in xs]
    except Exception:  # a module that is not a norm may want other inputs
        return None
    if any(s.shape != (d,) or not s.isfinite().all() for s in scales):
        return None
    miss = (scales[0] - scales[1]).abs().max()
    return scales[0] if miss <= TOLERANCE * scales[0].abs().max() else None


def norm_scale(norm: nn.Module, weights: dict[str, Tensor], d: int) -> Tensor | None:
    """Measure the effective scale [d] of a norm (1 + w where it is zero-centred); None if it is not a diagonal map."""
    return diagonal(lambda x: functional_call(norm, weights, (x,)), d)


def input_scale(router: nn.Module, weights: dict[str, Tensor], linear: str, d: int) -> Tensor | None:
    """Measure the diagonal map [d] from a router's input to the input of its linear layer `linear`."""
    seen: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        functional_call(router, weights, (x,))
        return seen.pop()

    with router.get_submodule(linear).register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        return diagonal(f, d)
