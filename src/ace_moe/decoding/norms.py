"""Which operations of a layer's graph are an RMS norm: found by trying them on random values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .nodes import evaluate, of_module, tensors, value

LARGEST_EPS = 1e-3
NEARLY_ALL = 0.98  # equal values from which two formulas are one: a root may be rounded otherwise


class Norm(NamedTuple):
    """x · (mean x² + eps)^-½ · scale: `plus` where 1 is added to the scale, `rounded` where x is rounded before it."""

    x: fx.Node
    scale: fx.Node
    eps: float
    plus: bool
    rounded: bool

    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "eps": self.eps, "plus": self.plus, "rounded": self.rounded}

    def reference(self, x: Tensor, scale: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        wide = wide.to(x.dtype).float() if self.rounded else wide
        return (wide * (scale.float() + 1 if self.plus else scale.float())).to(x.dtype)


def norm_of(node: fx.Node) -> Norm | None:
    """Find the RMS norm that a node is the result of: one input, one vector, and one of the kinds on random values."""
    nodes, inputs = of_module(node)
    if not tensors(inputs):
        return None
    scales = [n for n in inputs if value(n).dim() == 1]
    xs = [n for n in inputs if value(n).shape == value(node).shape]
    constants = {a for n in nodes for a in n.args if isinstance(a, float) and 0 < a < LARGEST_EPS}
    if not len(inputs) - 1 == len(scales) == len(xs) == len(constants) == 1:
        return None
    (x,), (scale,), (eps,) = xs, scales, constants
    if scale.op != "placeholder":  # kernels read a scale before they wait: nobody may be writing it
        return None
    given = drawn([x, scale])
    result = evaluate(nodes, given)
    if result is None:
        return None
    kinds = [Norm(x, scale, eps, plus, rounded) for plus in (False, True) for rounded in (True, False)]
    same = [equal(kind.reference(given[x], given[scale]), result) for kind in kinds]
    best = max(range(len(kinds)), key=same.__getitem__)
    return kinds[best] if same[best] > NEARLY_ALL else None


def drawn(nodes: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Draw random values of the nodes' shapes and types."""
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(value(n).shape, generator=draw).to(value(n).dtype) for n in nodes}


def equal(a: Tensor, b: Tensor) -> float:
    """Return the part of values that are the same."""
    return float((a == b).float().mean())
