"""AIMER's keep score: an expert whose weights differ much in size is hard to replace.

    R_e = mean|W_e| / rms(W_e) over gate, up and down together        K_e = 1 / R_e

R is √(2/π) = 0.798 for Gaussian weights of any scale, so the table is close to constant on many models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.records import MoELayer


def part(layer: MoELayer, chunk: slice) -> Tensor:
    """Compute K [C] of a chunk of experts, before the layer's mean is taken out."""
    matrices = [weights[chunk].flatten(1).float() for weights in (layer.w_in, layer.w_out)]
    count = sum(weights.shape[1] for weights in matrices)
    mean = torch.stack([weights.abs().sum(1) for weights in matrices]).sum(0) / count
    rms = (torch.stack([weights.square().sum(1) for weights in matrices]).sum(0) / count).sqrt()
    return rms / mean.clamp(min=torch.finfo(torch.float32).tiny)
