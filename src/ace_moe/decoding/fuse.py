"""What a compiler does not do with a decode step: one token's products read their matrices ahead and take the norm before
them and the sum after them along; and at any batch the experts add what their sum is added to.

`fuse` rewrites a layer's graph as Dynamo gives it, before the compiler sees it. Which operations are an RMS norm is found by
trying them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from ..kernels import ops  # noqa: F401  the experts' operator
from ..kernels.gemv import DEEPEST, MOST

VIEWS = ("view", "reshape", "contiguous")
LINEAR = torch.nn.functional.linear
GEMV, EXPERTS = torch.ops.ace_moe.gemv.default, torch.ops.ace_moe.experts.default
SUMS = (operator.add, operator.iadd, torch.add)
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


def fuse(graph: fx.Graph) -> None:
    """In place. Nodes are erased one by one: an unused write into a cache may look dead and is not."""
    for linears in _siblings(graph):
        for start in range(0, len(linears), MOST):
            _join(graph, linears[start : start + MOST])
    for node in graph.find_nodes(op="call_function", target=EXPERTS):
        _add_to(graph, node)


def _value(node: Any) -> Tensor:
    return node.meta["example_value"]


def _new(graph: fx.Graph, like: Tensor, target: Any, *args: Any, **options: Any) -> fx.Node:
    """A node with the example value later ones look at."""
    node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args, options)
    node.meta["example_value"] = like
    return node


def _flat(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """As [tokens, width]."""
    shape = -1, _value(node).shape[-1]
    return _new(graph, _value(node).reshape(shape), "reshape", node, shape)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """And the views it was made of, where nothing else needs them."""
    above = node.args[0]
    graph.erase_node(node)
    if isinstance(above, fx.Node) and _is_view(above) and not above.users:
        _erase(graph, above)


# ---- products -------------------------------------------------------------------------------------------------------


def _siblings(graph: fx.Graph) -> list[list[fx.Node]]:
    """Products of the same token with matrices of the layer."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=LINEAR):
        x, weight = _value(node.args[0]), node.args[1]
        one = x.numel() == x.shape[-1] <= DEEPEST and x.element_size() == 2
        if one and weight.op == "placeholder" and _is_plain(_value(weight), x.dtype):
            groups.setdefault(_source(node.args[0]), []).append(node)
    return list(groups.values())


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    """Not packed, which a class of its own shows, nor strided."""
    return isinstance(weight, FakeTensor) and weight.dtype == dtype and weight.is_contiguous()


def _is_view(node: fx.Node) -> bool:
    same = node.op == "call_method" and node.target in VIEWS
    return same and _value(node).shape[-1] == _value(node.args[0]).shape[-1]


def _source(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _join(graph: fx.Graph, linears: list[fx.Node]) -> None:
    """One operator for them all, with the norm in front; of one alone the sum behind as well."""
    source = _source(linears[0].args[0])  # type: ignore[arg-type]
    norm = norm_of(source)
    alone = norm is None and len(linears) == 1 and _bias(linears[0]) is None
    total, other = _sum_of(linears[0]) if alone else (None, None)
    with graph.inserting_before(source.next if norm else total or linears[0]):
        x = _flat(graph, norm.x if norm else source)
        options = norm.options() if norm else {"add": _flat(graph, other)} if other else {}
        matrices = [linear.args[1] for linear in linears]
        both = _new(graph, _value(x), GEMV, x, matrices, **options)
        y = _new(graph, _value(x), operator.getitem, both, 0)
        for linear, part in zip(linears, _parts(graph, y, linears), strict=True):
            (total or linear).replace_all_uses_with(part)
    if total:
        graph.erase_node(total)
    for linear in linears:
        _erase(graph, linear)
    if norm and source.users:  # others need it too
        both.kwargs = {**both.kwargs, "keep": True}
        with graph.inserting_after(both):
            kept = _new(graph, _value(x), operator.getitem, both, 1)
        with graph.inserting_after(kept):
            source.replace_all_uses_with(_new(graph, _value(source), "reshape", kept, tuple(_value(source).shape)))


def _parts(graph: fx.Graph, y: fx.Node, linears: list[fx.Node]) -> Iterator[fx.Node]:
    """Each product's own columns of them all, in its own shape."""
    first = 0
    for linear in linears:
        like, last = _value(linear), first + _value(linear).shape[-1]
        part = y if len(linears) == 1 else _new(graph, like, operator.getitem, y, (slice(None), slice(first, last)))
        part, first = _new(graph, like, "reshape", part, tuple(like.shape)), last
        bias = _bias(linear)
        yield part if bias is None else _new(graph, like, operator.add, part, bias)


def _bias(linear: fx.Node) -> Any:
    return linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")


def _sum_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """(the sum that alone needs this result, or a view of it; what it is added to)."""
    part = node
    while len(part.users) == 1 and _is_view(user := next(iter(part.users))):
        part = user
    if len(part.users) != 1 or (total := next(iter(part.users))).target not in SUMS or len(total.args) != 2:
        return None, None
    other = total.args[1] if total.args[0] is part else total.args[0]
    if not isinstance(other, fx.Node) or _value(other).shape != _value(part).shape or other is part:
        return None, None
    return total, other


# ---- experts --------------------------------------------------------------------------------------------------------


def _add_to(graph: fx.Graph, experts: fx.Node) -> None:
    """What the experts' result alone is added to becomes theirs to add."""
    total, other = _sum_of(experts)
    if total is None or other is None:
        return
    with graph.inserting_before(total):
        flat = _flat(graph, other)
        y = _new(graph, _value(flat), EXPERTS, *experts.args, **{**experts.kwargs, "add": flat})
        total.replace_all_uses_with(_new(graph, _value(total), "reshape", y, tuple(_value(total).shape)))
    below: Any = total.args[0] if total.args[1] is other else total.args[1]
    graph.erase_node(total)
    while below is not experts:
        below, gone = below.args[0], below
        graph.erase_node(gone)
    graph.erase_node(experts)


# ---- norms ----------------------------------------------------------------------------------------------------------


def norm_of(node: fx.Node) -> Norm | None:
    """The RMS norm whose result this node is: of one input and one vector, and on random values what one of the kinds gives."""
    nodes, inputs = _module(node)
    scales = [n for n in inputs if _value(n).dim() == 1]
    xs = [n for n in inputs if _value(n).shape == _value(node).shape]
    constants = {a for n in nodes for a in n.args if isinstance(a, float) and 0 < a < LARGEST_EPS}
    if not len(inputs) - 1 == len(scales) == len(xs) == len(constants) == 1:
        return None
    (x,), (scale,), (eps,) = xs, scales, constants
    draw = torch.Generator().manual_seed(0)
    given = {n: torch.randn(_value(n).shape, generator=draw).to(_value(n).dtype) for n in (x, scale)}
    found = _evaluate(nodes, dict(given))
    kinds = [Norm(x, scale, eps, plus, rounded) for plus in (False, True) for rounded in (True, False)]
    same = [float((kind.reference(given[x], given[scale]) == found).float().mean()) for kind in kinds]
    best = max(range(len(kinds)), key=same.__getitem__)
    return kinds[best] if same[best] > NEARLY_ALL else None


def _module(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(what the innermost module that made a node computed for it, in order; what went into that)."""
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}

    def inner(n: fx.Node) -> Any:
        return None if n.op == "placeholder" else next(reversed(n.meta.get("nn_module_stack") or {None: None}))

    def walk(n: fx.Node) -> None:
        if inner(n) is None or inner(n) != inner(node):
            inputs[n] = None
        elif n not in nodes:
            for above in n.all_input_nodes:
                walk(above)
            nodes[n] = None

    walk(node)
    return list(nodes), list(inputs)


def _evaluate(nodes: list[fx.Node], values: dict[fx.Node, Any]) -> Any:
    for n in nodes:
        args, options = fx.map_arg((n.args, n.kwargs), values.__getitem__)
        target: Any = getattr(args[0], str(n.target)) if n.op == "call_method" else n.target
        values[n] = target(*(args[1:] if n.op == "call_method" else args), **options)
    return values[nodes[-1]]
