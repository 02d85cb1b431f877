"""The embedded model's layers and experts, written out."""

import torch
import torch.nn.functional as F


def layer_of(model, number):
    return model.model.layers[number].mlp


def expert(model, number, e, x):
    """f_e(x) written with the weights: x [T, d] in fp32."""
    experts = layer_of(model, number).experts
    gate, up = (x @ experts.gate_up_proj[e].float().mT).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ experts.down_proj[e].float().mT


@torch.no_grad()
def logits_of(model, windows):
    return model(input_ids=windows.ids, use_cache=False).logits
