"""Similarity of experts by the norms of their weights: what the ACE paper's release takes for SERE's similarity.

With s_e = [‖Γ W_up‖ per column, ‖Γ W_gate‖ per column, ‖W_down‖ per row], each m long: S[p, q] = cos(s_p, s_q).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoint import MoEModel
from ...checkpoint.records import MoELayer
from ...errors import StructureError
from ...policies import Policy, Tables
from ...text import Windows


def similarities(policy: Policy, model: PreTrainedModel, windows: Windows | None) -> Tables:
    """S [E, E] of each layer, from its weights alone; one layer is in memory at a time."""
    moe, found = MoEModel.of(model), {}
    for site in moe.sites:
        layer = moe.layer(site)
        signatures = torch.cat([part(layer, chunk) for chunk in layer.chunks()])
        found[site.key] = {"sere_weights": similarity(signatures).float().cpu()}
    return found


def similarity(signature: Tensor) -> Tensor:
    """S [E, E], in [0, 1]."""
    unit = signature / signature.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (unit @ unit.mT).clamp(0, 1)


def part(layer: MoELayer, chunk: slice) -> Tensor:
    """[C, 3m] of a chunk of experts, or [C, 2m] where they have no gate projection."""
    if layer.norm_scale is None:
        raise StructureError(f"The weight similarity is undefined: {layer.undefined['gsp']}.")
    p = layer.projections(chunk)
    inner = [p.up] if p.gate is None else [p.up, p.gate]
    return torch.cat([(w * layer.norm_scale).norm(dim=2) for w in inner] + [p.down.norm(dim=1)], dim=1)
