"""What an expert answers on average: its output over Gaussian inputs behind the norm, from weights alone.

    x = Γ z, z ~ N(0, I):  (a, b) = (w_gate · x, w_up · x) is Gaussian in each inner component, with variances ‖Γ w‖² and
    covariance Σ Γ² w_gate w_up;   mean_e = W_down E[act(a, b)] + bias

The expectation is a sum over nodes of (a, b), so any activation, clamp and bias is the model's own. For silu it equals
cov(a, b) · E[silu′(a)] (Stein).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.records import MoELayer, Projections
from ..errors import StructureError

NODES = 24  # along a and along b
LONGEST = 4.0  # times the layer's median: an expert that would answer more stands out by its weights, not by its mean


def cut(means: Tensor) -> Tensor:
    """[E, d], what a skipped slot is replaced by; rows that are far longer than the others are cut to LONGEST."""
    length = means.norm(dim=1, keepdim=True)
    return means * (LONGEST * length.median() / length.clamp(min=torch.finfo(means.dtype).tiny)).clamp(max=1)


def part(layer: MoELayer, chunk: slice) -> Tensor:
    """[C, d] of a chunk of experts."""
    if layer.norm_scale is None:
        raise StructureError(f"The mean output is undefined: {layer.undefined['gsp']}.")
    p = layer.projections(chunk)
    inner = _expected(layer, p, layer.norm_scale, chunk)
    mean = torch.bmm(p.down, inner.unsqueeze(-1)).squeeze(-1)
    return layer.finish(mean if layer.b_out is None else mean + layer.b_out[chunk].float())


def _expected(layer: MoELayer, p: Projections, scale: Tensor, chunk: slice) -> Tensor:
    """E[act] of every inner component, [C, m]."""
    bias = None if layer.b_in is None else layer.b_in[chunk].float()
    up = p.up * scale
    if p.gate is None:
        along = up.norm(dim=2)
        centre = torch.zeros_like(along) if bias is None else bias
        return sum((w * layer.activate(centre + x * along) for x, w in nodes()), torch.zeros_like(along))
    gate = p.gate * scale
    along = gate.norm(dim=2)
    slope = torch.linalg.vecdot(gate, up) / along.clamp(min=torch.finfo(along.dtype).tiny)  # of b, with a's node
    across = (up.square().sum(2) - slope.square()).clamp(min=0).sqrt()
    total = torch.zeros_like(along)
    for x, first in nodes():
        for y, second in nodes():
            z = _joined(layer, x * along, x * slope + y * across)
            total += first * second * layer.activate(z if bias is None else z + bias)
    return total


def _joined(layer: MoELayer, gate: Tensor, up: Tensor) -> Tensor:
    """[C, 2m] in the order of the layer's own rows."""
    return torch.stack([gate, up], -1).flatten(-2) if layer.interleaved else torch.cat([gate, up], -1)


def nodes() -> list[tuple[float, float]]:
    """(x, weight): Σ weight f(x) is E[f(z)], z ~ N(0, 1), for smooth f."""
    x, weight = np.polynomial.hermite_e.hermegauss(NODES)
    return list(zip(x.tolist(), (weight / math.sqrt(2 * math.pi)).tolist(), strict=True))
