"""Routers that are a plain top-k, recognised by trying them, so that routing and rule can be one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TopK(NamedTuple):
    """softmax or sigmoid of x Wᵀ, the k largest, divided by their sum or not, times a number."""

    top_k: int
    sigmoid: bool
    normalise: bool
    times: float = 1.0


def reference(
    kind: TopK, logits: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Route as the kernel does, in torch: ids, gates [T, k] in fp32; chosen with `bias` [E], gates times `scale` [E]."""
    scores = logits.float().sigmoid() if kind.sigmoid else logits.float().softmax(-1)
    ids = (scores if bias is None else scores + bias.float()).topk(kind.top_k, dim=-1).indices
    gates = scores.gather(-1, ids)
    gates = gates / gates.sum(-1, keepdim=True) if kind.normalise else gates
    return ids, (gates if scale is None else gates * scale.float()[ids]) * kind.times


@torch.no_grad()
def recognise(router: nn.Module, top_k: int) -> TopK | None:
    """Find the kind whose logits, ids and gates equal the router's on random inputs; None for any other router."""
    parameters = dict(router.named_parameters())
    if set(parameters) != {"weight"} or any(True for _ in router.buffers()):
        return None
    weight = parameters["weight"]
    x = torch.randn(32, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = x.to(weight.device, weight.dtype)
    try:
        output = router(x)
    except TypeError:  # it wants more than the tokens
        return None
    if not (isinstance(output, tuple) and len(output) == 3):
        return None
    logits, gates, ids = output
    if not torch.equal(logits.reshape(32, -1), F.linear(x, weight)):
        return None
    kinds = [TopK(top_k, s, n) for s in (False, True) for n in (True, False)]
    return next((kind for kind in kinds if _agree(kind, logits, ids, gates)), None)


def _agree(kind: TopK, logits: Tensor, ids: Tensor, gates: Tensor) -> bool:
    """Compare by gate, since equal scores may be taken in any order."""
    _, expected = reference(kind, logits)
    got = gates.float().sort(-1, descending=True).values
    tolerance = 1e-2 if gates.dtype != torch.float32 else 1e-5
    scores = logits.float().sigmoid() if kind.sigmoid else logits.float().softmax(-1)
    chosen = scores.gather(-1, ids)
    same = torch.allclose(chosen.sort(-1, descending=True).values, scores.topk(kind.top_k, -1).values, rtol=1e-5)
    return same and torch.allclose(got, expected, rtol=tolerance, atol=1e-6)
