"""Routers found in a layer's graph by trying them, so that their top-k and the rule become one kernel."""

import pytest
import torch
from test_gemv import count, steps

import zoo
from ace_moe import ACE, build_plan
from ace_moe.decoding.fuse_routing import ROUTE, RULE, router_of
from ace_moe.errors import IntegrationError
from ace_moe.kernels.routing import TopK

GLM = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0}
KNOWN = [
    ("gemma4", {}, 1, TopK(4, False, True), "scale"), ("gpt_oss", {}, 1, TopK(4, False, True), ""),
    ("minimax_m2", {}, 1, TopK(4, True, True), "bias"), ("glm4_moe", GLM, 2, TopK(4, True, True, 2.5), "bias"),
]  # fmt: skip


def decided(model, batch, rewritten, monkeypatch):
    """Logits of two steps under a rule that skips, the graphs, and the counts."""
    with ACE(build_plan(model), policy="share", dispatch="kernels")(model) as ace:
        ace.set_threshold(0.26)
        logits, graphs = steps(model, batch, rewritten, monkeypatch)
        return logits, graphs, ace.report()


def kinds(graphs):
    found = [node for graph in graphs for node in graph.find_nodes(op="call_function", target=ROUTE)]
    return [(TopK(*node.args[8:12]), " ".join(node.kwargs)) for node in found]


@pytest.mark.long
@pytest.mark.parametrize(("family", "settings", "batch", "kind", "vectors"), KNOWN)
def test_a_router_and_the_rule_become_one_kernel(family, settings, batch, kind, vectors, monkeypatch):
    model = zoo.build(family, torch.float32, num_hidden_layers=1, **settings)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    expected, before, counted = decided(model, batch, False, monkeypatch)
    found, after, counts = decided(model, batch, True, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert counts["layers"] == counted["layers"] and 0 < counts["decode"]["kept"] < counts["decode"]["routed"]
    assert sum(count(before, RULE)) == sum(count(after, ROUTE)) > 0 == sum(count(after, RULE))
    assert set(kinds(after)) == {(kind, vectors)}


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.families())
def test_every_family_decides_the_same_rewritten(family, monkeypatch):
    model = zoo.build(family)
    if model.get_output_embeddings() is None:
        pytest.skip("it writes nothing")
    try:
        expected, before, counted = decided(model, 2, False, monkeypatch)
    except IntegrationError as error:
        pytest.skip(f"refused: {error}")
    found, after, counts = decided(model, 2, True, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert counts["layers"] == counted["layers"]
    assert sum(count(after, RULE)) + sum(count(after, ROUTE)) == sum(count(before, RULE)) + sum(count(before, ROUTE))


@pytest.mark.parametrize("experts", [16, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_other_router(experts, dtype):
    """Logits of which many would be equal, gates that were rounded, and a factor that is what the code says, not its rounding."""

    def route(logits):
        chosen, ids = logits.topk(8)
        return chosen.softmax(-1) * 2.5, ids

    (found,) = recognised(route, torch.randn(5, 8).to(dtype), torch.randn(experts, 8).to(dtype))
    assert found.kind == TopK(8, False, True, 2.5)


def test_vectors_are_told_apart_by_what_they_do():
    """A bias in a row of its own (ERNIE-4.5), and a scale."""
    moves, scales = torch.randn(1, 16), torch.rand(16) + 0.5

    def route(logits):
        scores = logits.sigmoid()
        ids = (scores + moves.squeeze()).topk(4, sorted=False)[1]
        return scores.gather(-1, ids) * scales[ids], ids

    (found,) = recognised(route, torch.randn(3, 8), torch.randn(16, 8))
    assert found.kind == TopK(4, True, False)
    assert [found.bias.meta["example_value"].shape, found.scale.meta["example_value"].shape] == [(1, 16), (16,)]


def squared(logits):
    return (logits * logits).softmax(-1).topk(4)


def without_the_first(logits):
    return logits.softmax(-1)[:, 4:].topk(4)


def in_groups(logits):
    """Two of four groups, by the sum of their two best."""
    scores = logits.sigmoid().view(-1, 4, 4)
    best = scores.topk(2, -1).values.sum(-1).topk(2, -1).indices
    mask = torch.zeros_like(scores[..., 0]).scatter(1, best, 1.0).unsqueeze(-1)
    return (scores * mask).flatten(1).topk(4)


def plain(logits):
    return logits.softmax(-1).topk(4)


def recognised(route, x, w):
    """What is found of the router in the graph of x wᵀ and this."""
    found = []

    def backend(module, inputs):
        gates, ids = next(reversed(module.graph.nodes)).args[0]
        found.append(router_of(ids, gates))
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x, w: tuple(route(torch.nn.functional.linear(x, w))), backend=backend)(x, w)
    return found


@pytest.mark.parametrize("route", [squared, without_the_first, in_groups, plain])
def test_anything_else_keeps_its_own_code(route):
    (found,) = recognised(route, torch.randn(2, 8), torch.randn(16, 8))
    assert (found and found.kind) == (TopK(4, False, False) if route is plain else None)
