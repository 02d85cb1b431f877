"""Small tools for a layer's graph as Dynamo gives it: values, new nodes, views, and what a part of it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

VIEWS = ("view", "reshape", "contiguous")


def value(node: Any) -> Tensor:
    return node.meta["example_value"]


def tensors(nodes: Iterable[fx.Node]) -> bool:
    """Look whether all values are tensors with a last dimension."""
    values = [n.meta.get("example_value") for n in nodes]
    return all(isinstance(v, Tensor) and v.dim() > 0 for v in values)


def new(graph: fx.Graph, like: Tensor, target: Any, *args: Any, **options: Any) -> fx.Node:
    """Add a node with the example value later ones look at."""
    node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args, options)
    node.meta["example_value"] = like
    return node


def flat(graph: fx.Graph, node: fx.Node, tokens: int = -1) -> fx.Node:
    """View a node as [tokens, width]; the last dimension stays where no number of tokens is given."""
    shape = (-1, value(node).shape[-1]) if tokens < 0 else (tokens, -1)
    return new(graph, value(node).reshape(shape), "reshape", node, shape)


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node, and the views it was made of where nothing else needs them."""
    above = node.args[0]
    graph.erase_node(node)
    if isinstance(above, fx.Node) and is_view(above) and not above.users:
        erase(graph, above)


def is_view(node: fx.Node) -> bool:
    same = node.op == "call_method" and node.target in VIEWS
    return same and value(node).shape[-1] == value(node.args[0]).shape[-1]


def source(node: fx.Node) -> fx.Node:
    """Find what a node is a view of."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def of_module(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Find (what the innermost module that made a node computed for it, in order; what went into that)."""

    def inner(n: fx.Node) -> Any:
        return None if n.op == "placeholder" else next(reversed(n.meta.get("nn_module_stack") or {None: None}))

    return behind([node], lambda n: inner(n) is None or inner(n) != inner(node))


def behind(ends: Sequence[fx.Node], given: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Find (what was computed for these nodes, in order; what went into that, where a node counts as given)."""
    nodes: set[fx.Node] = set()
    inputs: dict[fx.Node, None] = {}

    def walk(n: fx.Node) -> None:
        if given(n):
            inputs[n] = None
        elif n not in nodes:
            nodes.add(n)
            for other in (*n.all_input_nodes, *(user for user in n.users if _writes(user, n))):
                walk(other)

    for end in ends:
        walk(end)
    return [n for n in ends[0].graph.nodes if n in nodes], list(inputs)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Look whether a user changes the node's value where it is, and so belongs to it though nothing may use its own."""
    return user.op == "call_method" and str(user.target).endswith("_") and user.args[0] is node


def evaluate(nodes: Iterable[fx.Node], given: dict[fx.Node, Tensor]) -> Tensor | None:
    """Compute the last node's value from values of what goes into them; None where that takes the model."""
    values: dict[fx.Node, Any] = dict(given)
    result = None
    for n in nodes:
        args, options = fx.map_arg((n.args, n.kwargs), values.__getitem__)
        try:
            target: Any = getattr(args[0], str(n.target)) if n.op == "call_method" else n.target
            result = values[n] = target(*(args[1:] if n.op == "call_method" else args), **options)
        except Exception:  # an operator of whatever kind, on values made up for it
            return None
    return result
