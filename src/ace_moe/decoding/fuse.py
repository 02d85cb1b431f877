"""What a compiler does not do with a decode step: products of one token, or of a few, read their matrices ahead and take the norm
before them and the sum after them along; at any batch the experts add what their sum is added to, and attention norms, turns and
keeps its own token; a router's top-k and the rule are one kernel.

`fuse` rewrites a layer's graph as Dynamo gives it, before the compiler sees it. Which operations are an RMS norm is found by
trying them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ..kernels import ops  # noqa: F401  the experts' operator
from ..kernels.gemv import DEEPEST, FEW, MOST
from .fuse_attention import ATTEND, take_token
from .fuse_routing import LINEAR, RULE, take_router
from .nodes import erase, flat, is_view, new, source, value
from .norms import norm_of

GEMV, EXPERTS = torch.ops.ace_moe.gemv.default, torch.ops.ace_moe.experts.default
SUMS = (operator.add, operator.iadd, torch.add)
NARROW = 2  # bytes of a weight up to which a program holds its rows


def fuse(graph: fx.Graph) -> None:
    """Rewrite a graph in place. Nodes are erased one by one: an unused write into a cache may look dead and is not."""
    for node in graph.find_nodes(op="call_function", target=RULE):
        take_router(graph, node)
    for linears in _siblings(graph):
        for start in range(0, len(linears), MOST):
            _join(graph, linears[start : start + MOST])
    for node in graph.find_nodes(op="call_function", target=EXPERTS):
        _add_to(graph, node)
    for node in graph.find_nodes(op="call_function", target=ATTEND):
        take_token(graph, node)


# ---- products -------------------------------------------------------------------------------------------------------


def _siblings(graph: fx.Graph) -> list[list[fx.Node]]:
    """Group products of the same token, or of the same few, with matrices of the layer."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        x, matrix = value(node.args[0]), node.args[1]
        few = x.numel() <= FEW * x.shape[-1] and x.shape[-1] <= DEEPEST and x.element_size() <= NARROW
        if not few or matrix.op != "placeholder":
            continue
        weight = value(matrix)  # not packed, which a class of its own shows, nor strided
        if isinstance(weight, FakeTensor) and weight.dtype == x.dtype and weight.is_contiguous():
            groups.setdefault(source(node.args[0]), []).append(node)
    return list(groups.values())


def _join(graph: fx.Graph, linears: list[fx.Node]) -> None:
    """Put one operator in place of them all, with the norm in front; of one alone the sum behind as well."""
    entry = source(linears[0].args[0])  # type: ignore[arg-type]
    norm = norm_of(entry)
    alone = norm is None and len(linears) == 1 and _bias(linears[0]) is None
    total, other = _sum_of(linears[0]) if alone else (None, None)
    with graph.inserting_before(entry.next if norm else total or linears[0]):
        x = flat(graph, norm.x if norm else entry)
        options = norm.options() if norm else {"add": flat(graph, other)} if other else {}
        matrices = [linear.args[1] for linear in linears]
        both = new(graph, value(x), GEMV, x, matrices, **options)
        y = new(graph, value(x), operator.getitem, both, 0)
        for linear, part in zip(linears, _parts(graph, y, linears), strict=True):
            if total is None:
                linear.replace_all_uses_with(part)
            else:
                _stand_for(graph, part, total, linear)
    for linear in linears:
        erase(graph, linear)
    if norm and entry.users:  # others need it too
        both.kwargs = {**both.kwargs, "keep": True}
        with graph.inserting_after(both):
            kept = new(graph, value(x), operator.getitem, both, 1)
        with graph.inserting_after(kept):
            entry.replace_all_uses_with(new(graph, value(entry), "reshape", kept, tuple(value(entry).shape)))


def _parts(graph: fx.Graph, y: fx.Node, linears: list[fx.Node]) -> Iterator[fx.Node]:
    """Yield each product's own part of them all, in its own shape."""
    first = 0
    for linear in linears:
        like, last = value(linear), first + value(linear).numel()
        part = y if len(linears) == 1 else new(graph, like, operator.getitem, y, slice(first, last))
        part, first = new(graph, like, "reshape", part, tuple(like.shape)), last
        bias = _bias(linear)
        yield part if bias is None else new(graph, like, operator.add, part, bias)


def _bias(linear: fx.Node) -> Any:
    return linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")


def _sum_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """Find (the sum that alone needs this result, or a view of it; what it is added to)."""
    part = node
    while len(part.users) == 1 and is_view(user := next(iter(part.users))):
        part = user
    if len(part.users) != 1 or (total := next(iter(part.users))).target not in SUMS or len(total.args) != 2:
        return None, None
    other = total.args[1] if total.args[0] is part else total.args[0]
    if not isinstance(other, fx.Node) or value(other).shape != value(part).shape or other is part:
        return None, None
    return total, other


def _stand_for(graph: fx.Graph, y: fx.Node, total: fx.Node, node: fx.Node) -> None:
    """Put y in the place of a sum; the sum and the views between it and the node whose result it had are no more."""
    total.replace_all_uses_with(new(graph, value(total), "reshape", y, tuple(value(total).shape)))
    between = next(n for n in total.all_input_nodes if source(n) is node)
    graph.erase_node(total)
    while between is not node:
        between, gone = between.args[0], between  # type: ignore[assignment]
        graph.erase_node(gone)


# ---- experts --------------------------------------------------------------------------------------------------------


def _add_to(graph: fx.Graph, experts: fx.Node) -> None:
    """Have the experts add what their result alone is added to."""
    total, other = _sum_of(experts)
    if total is None or other is None:
        return
    with graph.inserting_before(total):
        added = flat(graph, other)
        y = new(graph, value(added), EXPERTS, *experts.args, **{**experts.kwargs, "add": added})
        _stand_for(graph, y, total, experts)
    graph.erase_node(experts)
