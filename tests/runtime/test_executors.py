"""Executors: kept slots alone are the stock function with sentinels, on fewer rows; one is chosen, with reasons."""

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

import zoo
from ace_moe.checkpoint.model import MoEModel
from ace_moe.decider.executors import choose, kept_alone
from ace_moe.engines.transformers.experts import SENTINELS, Compact, on_gpu
from ace_moe.errors import IntegrationError, OptionError

TOKENS, K = 11, 4


@pytest.fixture(scope="module")
def experts():
    module = zoo.build("qwen3_moe").model.layers[1].mlp.experts
    if hasattr(module, SENTINELS):
        setattr(module, SENTINELS, True)  # stock masks sentinel rows under this flag
    return module


def routed(experts, skipped):
    """hidden [T, d], ids and gates [T, k]; the id past the last expert at skipped slots."""
    g = torch.Generator().manual_seed(0)
    e = experts.num_experts
    hidden = torch.randn(TOKENS, experts.gate_up_proj.shape[2], generator=g)
    ids = torch.rand(TOKENS, e, generator=g).argsort(1)[:, :K]
    return hidden, torch.where(torch.rand(TOKENS, K, generator=g) < skipped, e, ids), torch.rand(TOKENS, K, generator=g)


@torch.no_grad()
@pytest.mark.parametrize("skipped", [0.0, 0.5, 1.0])
def test_the_same_as_with_sentinels(experts, skipped):
    (hidden, ids, gates), e, rows = routed(experts, skipped), experts.num_experts, []
    flag = getattr(experts, SENTINELS, None)

    def counted(module, hidden, ids, gates):
        rows.append(ids.numel())
        assert not getattr(module, SENTINELS, False), "where no sentinel is left, none is looked for"
        return grouped_mm_experts_forward(module, hidden, ids, gates)

    found = Compact()(counted, experts, hidden, ids, gates)
    expected = grouped_mm_experts_forward(experts, hidden, ids, gates)
    assert torch.equal(found, expected) if skipped == 0 else torch.allclose(found, expected, atol=1e-5)
    kept = int((ids < e).sum())
    assert rows == ([kept] if kept else []), "one call with the kept slots, none for nothing"
    assert getattr(experts, SENTINELS, None) == flag, "the module is left as it was"


@torch.no_grad()
def test_a_failure_leaves_the_module_as_it_was(experts):
    flag = getattr(experts, SENTINELS, None)

    def broken(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Compact()(broken, experts, *routed(experts, 0.5))
    assert getattr(experts, SENTINELS, None) == flag


def test_kept_alone_adds_up_in_fp32():
    """bf16 parts of one token: each is rounded once, their sum once more."""
    hidden, ids, gates = (
        torch.ones(2, 1, dtype=torch.bfloat16),
        torch.zeros(2, 300, dtype=torch.int64),
        torch.ones(2, 300),
    )
    kept = torch.zeros(2, 300, dtype=torch.bool)
    kept[0] = True
    y = kept_alone(lambda x, ids, gates: x * gates.to(x.dtype), hidden, ids, gates, kept)
    assert y.dtype == torch.bfloat16 and y.flatten().tolist() == [300.0, 0.0]


def test_only_where_shapes_may_follow_the_data(experts):
    """On another device, and while a compiler looks on, the stock function gets all slots."""
    hidden, ids, gates = (t.to("meta") for t in routed(experts, 0.5))
    seen = []
    Compact()(lambda m, *slots: seen.append(slots[1].shape) or slots[0], experts, hidden, ids, gates)
    assert seen == [(TOKENS, K)]

    def step(x, ids, gates):
        return Compact()(lambda m, x, ids, gates: x * gates.sum(-1, keepdim=True), experts, x, ids, gates)

    given = torch.ones(3, 2), torch.tensor([[experts.num_experts, 1]] * 3), torch.tensor([[8.0, 1.0]] * 3)
    assert torch.compile(step, fullgraph=True, backend="eager")(*given).unique().tolist() == [9.0]
    assert step(*given).unique().tolist() == [1.0]


def test_the_first_that_holds_is_chosen_and_the_others_say_why():
    second, third = (type("Runs", (), {"name": name})() for name in ("second", "third"))
    offers = {"first": "no GPU", "second": second, "third": third}
    chosen = choose(offers)
    assert str(chosen) == "second" and chosen.refused == {"first": "no GPU"}
    assert choose(offers, "second").refused == {"first": "second was asked for"}
    with pytest.raises(IntegrationError, match="first cannot run here: no GPU"):
        choose(offers, "first", "here")
    with pytest.raises(OptionError, match="fourth"):
        choose(offers, "fourth")
    with pytest.raises(IntegrationError, match="first: no GPU"):
        choose({"first": offers["first"]})


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma4", "nemotron_h"])
def test_which_executor_on_a_gpu(name):
    pytest.importorskip("triton")
    assert on_gpu(MoEModel.of(zoo.build(name)).sites[0].experts) == "kernels"
