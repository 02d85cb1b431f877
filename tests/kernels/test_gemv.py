"""One token times matrices, with norm and sum, against torch; and a layer's graph rewritten to use that."""

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from ace_moe import ACE, build_plan
from ace_moe.decoding import Decoder, attention, layerwise, nodes
from ace_moe.decoding import fuse as fuse_module
from ace_moe.decoding.fuse import ATTEND, EXPERTS, GEMV, LINEAR, SUMS, fuse
from ace_moe.decoding.fuse_attention import ATTEND_TOKEN
from ace_moe.errors import IntegrationError
from ace_moe.kernels import gemv as gemv_module
from ace_moe.kernels.gemv import DEEPEST, FEW, gemv, room, tile


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, FEW), st.integers(3, 300), st.lists(st.integers(1, 21), min_size=1, max_size=4), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_few_tokens_times_matrices(tokens, columns, rows, normed, plus):
    draw = torch.Generator().manual_seed(columns)
    x, scale, added = (torch.randn(*s, generator=draw) for s in ((tokens, columns), (columns,), (tokens * sum(rows),)))
    weights = [torch.randn(n, columns, generator=draw) for n in rows]
    norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (scale + plus) if normed else x
    found, kept = gemv(x, weights, scale if normed else None, 1e-5, plus, False, normed, added)
    expected = torch.cat([(norm @ w.T).flatten() for w in weights])
    torch.testing.assert_close(found, expected + added, rtol=1e-4, atol=1e-4)
    if normed:
        torch.testing.assert_close(kept, norm, rtol=1e-5, atol=1e-5)


def test_a_program_holds_whole_rows_and_the_grid_stays_wide():
    tiles = [
        tile(rows, columns, 8192) for rows, columns in ((5120, 2048), (2048, 4096), (2048, 8192), (128, 2048), (9, 3))
    ]
    assert tiles == [(4, 2048, 1), (2, 2048, 2), (1, 2048, 4), (1, 2048, 1), (1, 8, 1)]


def test_threads_hold_no_more_of_wide_tokens_than_of_narrow_ones():
    assert [room(4, columns)[:2] for columns in (0, 2048, 2816, 5120, DEEPEST)] == [
        (8192, 4), (8192, 4), (16384, 8), (32768, 16), (32768, 16)
    ]  # fmt: skip
    assert room(1, DEEPEST) == room(1)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def steps(model, batch, rewritten, monkeypatch):
    """Logits of two decode steps, each layer's graph run as it is or rewritten; and the graphs."""
    monkeypatch.setattr(gemv_module, "PROGRAMS", 1)  # an interpreter runs them one after the other
    graphs = []

    def backend(module, inputs):
        if rewritten:
            fuse(module.graph)
            module.graph.lint()
            module.recompile()
        graphs.append(module.graph)
        return module.forward

    def compiled(number, options):
        return torch.compile(layerwise._call, fullgraph=True, backend=backend)

    monkeypatch.setattr(layerwise, "_compiled", compiled)
    torch._dynamo.reset()
    decoder = Decoder(model, batch, 32)
    decoder.prefill(zoo.inputs(batch, 9)["input_ids"])
    with torch.no_grad(), layerwise.compiled_layers(model, decoder.cache):
        return torch.stack([decoder._advance(decoder.cache) for _ in range(2)]), graphs


def attending(model, monkeypatch):
    """The decode kernel without a GPU too: an interpreter runs it."""
    monkeypatch.setattr(attention, "DEVICES", ("cuda", "cpu"))
    model.set_attn_implementation(attention.IMPLEMENTATION)
    return model


def count(graphs, target):
    return [sum(node.target is target for node in graph.nodes) for graph in graphs]


def apart(found, expected):
    return float((found - expected).float().norm() / expected.float().norm())


def writes(graphs):
    """Into caches and states."""
    return [[n.target for n in g.nodes if n.op == "call_method" and n.target.endswith("_")] for g in graphs]


@pytest.mark.parametrize(("family", "layers", "batch"), [("gemma4", 2, 1), ("gemma4", 2, 3), ("qwen3_5_moe", 4, 1)])
def test_a_rewritten_layer_says_the_same(family, layers, batch, monkeypatch):
    model = zoo.build(family, torch.float32, num_hidden_layers=layers)
    exact, _ = steps(model, batch, False, monkeypatch)
    expected, before = steps(model.bfloat16(), batch, False, monkeypatch)
    found, after = steps(model, batch, True, monkeypatch)
    assert apart(found, exact) < 1.5 * apart(expected, exact)
    assert all(n > 0 for n in count(before, LINEAR)) and not any(count(after, LINEAR))
    assert writes(before) == writes(after)


@pytest.mark.long
def test_norms_and_sums_go_into_the_products(monkeypatch):
    model = zoo.build("qwen3_moe", torch.bfloat16, num_hidden_layers=1)
    with ACE(build_plan(model), dispatch="kernels")(model):
        expected, _ = steps(model, 1, False, monkeypatch)
        found, (graph, *_) = steps(model, 1, True, monkeypatch)
    assert apart(found, expected) < 0.02
    qkv, out, router = graph.find_nodes(op="call_function", target=GEMV)
    assert [len(node.args[1]) for node in (qkv, out, router)] == [3, 1, 1]
    assert qkv.kwargs.get("scale") and router.kwargs.get("keep") and out.kwargs.get("add")
    assert graph.find_nodes(op="call_function", target=EXPERTS)[0].kwargs["add"]
    both = [n for n in graph.nodes if n.target in SUMS and all(isinstance(a, torch.fx.Node) for a in n.args)]
    assert all({operator.mul, torch.mul} & {a.target for a in n.args} for n in both)  # rotary alone


@pytest.mark.parametrize(
    ("family", "taken"),
    [("qwen3_moe", True), ("mixtral", True), ("olmoe", True), ("glm4_moe", False), ("gemma4", True)],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_token_goes_into_the_attention_as_its_product_gave_it(family, taken, batch, monkeypatch):
    """Where a part of a head alone is turned, the compiler does it."""
    model = attending(zoo.build(family, torch.float32, num_hidden_layers=1), monkeypatch)
    expected, before = steps(model, batch, False, monkeypatch)
    found, after = steps(model, batch, True, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert set(count(before, ATTEND)) == {1} == set(count(after, ATTEND_TOKEN if taken else ATTEND))
    assert all(("index_copy_" in found) is not taken for found in writes(after))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "afmoe" else pytest.mark.slow) for f in zoo.families()]
)
def test_every_family_says_the_same_rewritten(family, batch, monkeypatch):
    """In fp32, where all that is left is the order of sums. afmoe adds a view of a product."""
    monkeypatch.setattr(fuse_module, "NARROW", 4)
    model = zoo.build(family)
    if model.get_output_embeddings() is None:
        pytest.skip("it writes nothing")
    try:
        expected, before = steps(attending(model, monkeypatch), batch, False, monkeypatch)
    except IntegrationError as error:
        pytest.skip(f"refused: {error}")
    found, after = steps(model, batch, True, monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert sum(count(after, LINEAR)) < sum(count(before, LINEAR))


def test_more_tokens_and_wide_types_are_left_to_the_compiler(monkeypatch):
    model = zoo.build("qwen3_moe", torch.bfloat16, num_hidden_layers=1)
    _, graphs = steps(model, FEW + 1, True, monkeypatch)
    assert not any(count(graphs, GEMV))
    _, graphs = steps(model.float(), 1, True, monkeypatch)
    assert not any(count(graphs, GEMV))


def test_layers_are_rewritten_unless_asked_otherwise():
    model = zoo.build("qwen3_moe", torch.bfloat16, num_hidden_layers=1)
    assert Decoder(model, 1, 32).options["pre_grad_custom_pass"] is fuse
    assert "pre_grad_custom_pass" not in Decoder(model, 1, 32, fused=False).options


def test_what_cannot_be_tried_is_left_alone():
    """An operator that needs the model's own tensors, where a norm is looked for."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert nodes.evaluate([graph.call_function(torch.linalg.inv, (x,))], {x: torch.randn(3)}) is None
