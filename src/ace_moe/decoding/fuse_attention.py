"""A decode step's own token: its query and key are normed and turned by its position, key and value written into the cache.

A compiler makes three kernels of that in front of attention; the attention's own programs can do it on their way. That a
graph does just this is found by trying it on random values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..kernels import attend  # noqa: F401  the operators
from .nodes import evaluate, flat, new, of_module, tensors, value
from .norms import NEARLY_ALL, Norm, drawn, equal, norm_of

ATTEND, ATTEND_TOKEN = torch.ops.ace_moe.attend.default, torch.ops.ace_moe.attend_token.default


class Turned(NamedTuple):
    """Heads [B, 1, H · D] before they are turned, the norm that is theirs, and the angles' cosines and sines."""

    heads: fx.Node
    norm: Norm | None
    angles: tuple[fx.Node, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Name what query and key must have in common."""
        return (*self.angles, self.norm and self.norm[2:])


def take_token(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite in place, where the cache is written once and all that is done to the token is known; else change nothing."""
    query, keys, values, *rest = node.args
    writes = [_write_of(cache) for cache in (keys, values)]
    if None in writes or value(query).shape[-1] % 2:
        return
    (place, key), (other, fresh) = ((w.args[2], w.args[3]) for w in writes)  # type: ignore[union-attr]
    turned, straight = [_turned(n) for n in (query, key)], _turned(fresh, angles=0)
    if place is not other or None in (*turned, straight) or turned[0].kind != turned[1].kind:  # type: ignore[union-attr]
        return
    q, k, v = (t for t in (*turned, straight) if t)
    batch = value(query).shape[0]
    with graph.inserting_before(node):
        heads = [flat(graph, t.heads, batch) for t in (q, k, v)]
        options = {"eps": q.norm.eps, "plus": q.norm.plus, "rounded": q.norm.rounded} if q.norm else {}
        scales = {"q_scale": q.norm.scale, "k_scale": k.norm.scale} if q.norm and k.norm else {}
        arguments = (*heads, *q.angles, keys, values, place, *rest)
        node.replace_all_uses_with(new(graph, value(node), ATTEND_TOKEN, *arguments, **scales, **options))
    for gone in (node, *writes):
        graph.erase_node(gone)  # type: ignore[arg-type]


def _write_of(cache: Any) -> fx.Node | None:
    """Find the only write into a cache before it is attended to."""
    writes = [user for user in cache.users if user.op == "call_method" and user.target == "index_copy_"]
    return writes[0] if len(writes) == 1 and len(cache.users) == 2 and writes[0].args[1] == 2 else None


def _turned(node: Any, angles: int = 2) -> Turned | None:
    """Find what became this node [B, H, 1, D], if it was only turned by two angles' functions, or by none."""
    nodes, inputs = of_module(node)
    if not tensors(inputs):
        return None
    wide = [n for n in inputs if value(n).numel() == value(node).numel()]
    others = [n for n in inputs if n not in wide]
    if len(wide) != 1 or len(others) != angles or {value(n).shape[-1] for n in others} - {value(node).shape[-1]}:
        return None
    values = drawn(inputs)
    if (result := evaluate(nodes, values)) is None:
        return None
    for order in (others, others[::-1]):
        if equal(_turn(values[wide[0]], result.shape, *(values[n] for n in order)), result) > NEARLY_ALL:
            norm = norm_of(wide[0]) if angles else None
            own = norm is not None and value(norm.scale).shape[0] == value(node).shape[-1]
            return Turned(norm.x, norm, tuple(order)) if norm and own else Turned(wide[0], None, tuple(order))
    return None


def _turn(heads: Tensor, shape: torch.Size, *angles: Tensor) -> Tensor:
    """Turn heads as transformers does it, the first half of a head against its second: [B, H, 1, D]."""
    x = heads.reshape(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    if not angles:
        return x
    cos, sin = (a.reshape(-1, 1, 1, shape[3]) for a in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
