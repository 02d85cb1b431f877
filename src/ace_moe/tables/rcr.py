"""RCR, the Router-Conditioned Refinement: an expert's response along the direction its router row prefers.

    w̃_e = w_e − mean_j w_j        q_e = ρ · w̃_e / (RMS(w̃_e) + ε), ρ = 1        RCR = ‖f_e(q_e)‖ / (‖q_e‖ + ε)

f_e is the expert's complete forward, with its own activation, clamps and biases. Where router and experts see
different inputs (Gemma-4: the router sees the residual u, the experts γ ∘ u), w_e is the gradient of the router's
logit with respect to the experts' input: scale ∘ w / γ.
"""

from __future__ import annotations

from torch import Tensor

from ..checkpoint.records import MoELayer
from ..errors import StructureError

EPSILON = 1e-8  # the paper names no value


def part(layer: MoELayer, chunk: slice, centre: bool = True) -> Tensor:
    """Compute RCR [C] of a chunk of experts, before the layer's mean is taken out.

    Without `centre` w̃ = w: what the authors' release computes unless told otherwise.
    """
    q = prototypes(layer, chunk, centre)
    return layer.respond(q, chunk).norm(dim=1) / (q.norm(dim=1) + EPSILON)


def prototypes(layer: MoELayer, chunk: slice, centre: bool = True) -> Tensor:
    """Make one input of RMS 1 per expert of the chunk, [C, d]."""
    if layer.router_rows is None:
        raise StructureError(f"RCR is undefined: {layer.undefined['rcr']}.")
    rows = layer.router_rows[chunk]
    centred = rows - layer.router_rows.mean(dim=0, keepdim=True) if centre else rows
    return centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + EPSILON)
