"""GSP, the Global Spectral Proxy: an expert's transformation capacity from its three projections and the norm.

    a_up   = ‖Γ W_up‖ · ‖Γ W_gate W_down‖        a_gate = ‖Γ W_gate‖ · ‖Γ W_up W_down‖        (Frobenius norms)
    GSP    = sqrt(a_up · a_gate)

No d×d product is formed: ‖Γ W_a W_down‖² = Σ (W_aᵀ Γ² W_a) ∘ (W_down W_downᵀ), elementwise over m×m, and the trace of
the first factor is ‖Γ W_a‖².
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from ..checkpoint.records import MoELayer
from ..errors import StructureError

NEARLY_ORTHOGONAL = 1e-3  # under this share of its typical value the fp32 sum has lost digits: redo it in fp64


def part(layer: MoELayer, chunk: slice) -> Tensor:
    """Compute GSP [C] of a chunk of experts, before the layer's mean is taken out; in fp64 where fp32 does not suffice."""
    if layer.norm_scale is None:
        raise StructureError(f"GSP is undefined: {layer.undefined['gsp']}.")
    matrices = _as_gated(layer, chunk)
    values, trusted = _paths(*matrices, layer.norm_scale)
    if not trusted.all():
        gate, up, down = (matrix[~trusted].double() for matrix in matrices)
        values[~trusted] = _paths(gate, up, down, layer.norm_scale.double())[0].float()
    return values


def _as_gated(layer: MoELayer, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down. relu(z)² = relu(z) · z: an ungated expert with a squared activation has its up as its gate."""
    p = layer.projections(chunk)
    if p.gate is not None:
        return p.gate, p.up, p.down
    z = torch.tensor([4.0, 8.0])
    if not torch.allclose(layer.activate(2 * z), 4 * layer.activate(z)):
        raise StructureError(
            f"GSP is undefined: layer {layer.key}: {layer.path} has no gate projection and its activation is not a square."
        )
    return p.up, p.up, p.down


def _paths(gate: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute raw GSP [C], and tell where the working precision suffices [C]."""
    m = up.shape[1]
    size = max(256, -(-m // 4))  # of blocks of rows: small enough to save, large enough to multiply at full speed
    rows = [w.split(size, dim=1) for w in (gate * scale, up * scale, down.mT)]
    traces, paths = up.new_zeros(3, len(up)), up.new_zeros(2, len(up))
    for i, j in combinations_with_replacement(range(len(rows[0])), 2):
        grams = [torch.bmm(blocks[i], blocks[j].mT) for blocks in rows]
        if i == j:
            traces += torch.stack([g.diagonal(dim1=1, dim2=2).sum(1) for g in grams])
        weight = 1 if i == j else 2  # a Gram matrix is symmetric: its lower blocks need not be computed
        paths += weight * torch.stack([torch.linalg.vecdot(g.flatten(1), grams[2].flatten(1)) for g in grams[:2]])
    trusted = (paths >= NEARLY_ORTHOGONAL / m * traces[2] * traces[:2]).all(0)
    return (traces[:2] * paths.clamp(min=0)).sqrt().prod(0).sqrt(), trusted
