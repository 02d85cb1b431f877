"""A router's top-k and the rule behind it as one kernel, where the k largest of an expert's scores are all there is to it.

Scores may be moved by a bias while experts are chosen, gates scaled for each expert or by a number (Gemma-4, GLM-4, DeepSeek
without groups …). That a graph does just this is found by trying it on random values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..kernels import decide  # noqa: F401  the operators
from ..kernels.routing import TopK, reference
from .nodes import behind, evaluate, flat, new, tensors, value

LINEAR = torch.nn.functional.linear
RULE, ROUTE = torch.ops.ace_moe.rule.default, torch.ops.ace_moe.route.default
TRIALS = 16  # random routings a router is tried on: a decode step has few tokens
PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")


class Router(NamedTuple):
    """A router as the kernel runs it: the logits, how they become gates, and the vectors of E numbers that go into that."""

    logits: fx.Node
    kind: TopK
    bias: fx.Node | None = None
    scale: fx.Node | None = None


def take_router(graph: fx.Graph, rule: fx.Node) -> None:
    """Rewrite in place, where the rule's ids and gates come from a router that is known; else change nothing."""
    ids, gates, *common, voting, _ = rule.args
    router = router_of(ids, gates)
    if router is None:
        return
    options = {name: node for name, node in (("bias", router.bias), ("scale", router.scale)) if node is not None}
    types = value(gates).dtype, value(ids).dtype
    with graph.inserting_before(rule):
        logits = flat(graph, router.logits, value(ids).shape[0])
        both = new(graph, rule.meta["example_value"], ROUTE, logits, *common, *router.kind, *types, voting, **options)
    rule.replace_all_uses_with(both)
    graph.erase_node(rule)


def router_of(ids: Any, gates: Any) -> Router | None:
    """Find the router whose choice these nodes [T, k] are: of one product's result and at most two vectors."""
    nodes, inputs = behind([ids, gates], lambda n: n.op == "placeholder" or n.target is LINEAR)
    if not tensors(inputs):
        return None
    tokens, top_k = value(ids).shape
    products, vectors = ([n for n in inputs if (n.target is LINEAR) is linear] for linear in (True, False))
    if len(products) != 1 or len(vectors) > 2:
        return None
    experts = value(products[0]).shape[-1]
    if value(products[0]).numel() != tokens * experts or any(value(v).shape.numel() != experts for v in vectors):
        return None
    trials = [_tried(nodes, inputs, (ids, gates), seed) for seed in range(TRIALS)]
    factors = {float(a) for n in nodes if n.target in PRODUCTS for a in n.args if isinstance(a, (int, float))}
    ways = _ways(products[0], vectors, top_k, sorted({1.0, *factors}))
    return next((way for way in ways if all(trial is not None and _agree(way, trial) for trial in trials)), None)


class Trial(NamedTuple):
    """Values of what goes into a router, and what its own code chose: ids and gates [T, k]."""

    given: dict[fx.Node, Tensor]
    ids: Tensor
    gates: Tensor


def _tried(nodes: list[fx.Node], inputs: list[fx.Node], results: tuple[fx.Node, fx.Node], seed: int) -> Trial | None:
    """Try a router's own code on random values; None where that cannot be done."""
    draw = torch.Generator().manual_seed(seed)
    given = {n: _drawn(value(n), draw) for n in inputs}
    ids, gates = (evaluate(nodes[: nodes.index(result) + 1], given) for result in results)
    return None if ids is None or gates is None else Trial(given, ids, gates)


def _drawn(like: Tensor, draw: torch.Generator) -> Tensor:
    """Draw random values, none of them twice in a row: among equals any may be chosen."""
    pool = torch.randn(16 * like.shape[-1], generator=draw).to(like.dtype).unique()
    rows = [pool[torch.randperm(len(pool), generator=draw)[: like.shape[-1]]] for _ in range(like[..., 0].numel())]
    return torch.stack(rows).view(like.shape)


def _ways(logits: fx.Node, vectors: list[fx.Node], top_k: int, factors: list[float]) -> Iterator[Router]:
    """Yield every way there might be; a vector is one that experts are chosen by or one that gates are scaled by."""
    roles = [pair for pair in permutations([*vectors, None, None], 2) if set(vectors) <= set(pair)]
    kinds = product((False, True), (True, False), factors)
    for (bias, scale), (sigmoid, normalise, times) in product(dict.fromkeys(roles), kinds):
        yield Router(logits, TopK(top_k, sigmoid, normalise, times), bias, scale)


def _agree(way: Router, trial: Trial) -> bool:
    """Compare a way with what the router's own code chose."""
    logits = trial.given[way.logits].reshape(trial.ids.shape[0], -1)
    bias, scale = (None if n is None else trial.given[n].flatten() for n in (way.bias, way.scale))
    ids, gates = _by_expert(*reference(way.kind, logits, bias, scale))
    own_ids, own_gates = _by_expert(trial.ids, trial.gates.float())
    near = 1e-5 if trial.gates.dtype == torch.float32 else 1e-2  # rounded in other places
    return torch.equal(ids, own_ids) and torch.allclose(gates, own_gates, rtol=near, atol=0)


def _by_expert(ids: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Put slots in the order of their experts: routers give them in any."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), gates.gather(-1, order)
