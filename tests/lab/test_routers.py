"""Random routers that route like real ones: the shares of their gates and the experts a batch reads, alone and in models."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ace_moe import ACE, build_plan
from ace_moe.errors import OptionError
from ace_moe.lab.bench import shapes
from ace_moe.lab.bench.routers import (
    FLAT,
    KINDS,
    SHARES,
    SKEWED,
    RandomRouter,
    default_union,
    mean_union,
    shape_routers,
    target_shares,
    uniform_union,
)
from ace_moe.lab.bench.routing import observe
from ace_moe.lab.bench.tokens import random_tokens

FRESH = range(100, 108)  # seeds that no fit has seen


def fresh(router, tokens=2048):
    return [router.logits(tokens, seed) for seed in FRESH]


def mean_shares(logits, k):
    """Of a softmax router's k gates, largest first, [k]."""
    return logits.topk(k, dim=-1).values.softmax(-1).mean(0)


def union_of(router, batch=16):
    found = [mean_union(logits, router.k, batch) for logits in fresh(router)]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("kind", "experts", "union"), [(FLAT, 128, None), (SKEWED, 128, 49), (SKEWED, 128, 30), (SKEWED, 256, None)]
)
def test_shares_and_union_are_those_asked_for(kind, experts, union):
    router = RandomRouter.like(kind, experts, 8, union)
    shares = mean_shares(torch.cat(fresh(router)), 8)
    assert (shares - torch.tensor(SHARES)).abs().max() < 0.01
    expected = uniform_union(experts, 8, 16) if kind == FLAT else union or default_union(experts, 8)
    assert union_of(router) == pytest.approx(expected, rel=0.05)
    assert router.union(64) == pytest.approx(union_of(router, 64), rel=0.05)


@settings(max_examples=3, deadline=None)
@given(experts=st.sampled_from([16, 30, 64]), k=st.integers(1, 8), part=st.floats(0, 1))
@example(experts=30, k=7, part=0.0)  # a last group of two experts bent the curve by 0.03
def test_other_numbers_of_experts_and_slots(experts, k, part):
    least, chance = RandomRouter(SKEWED, experts, k, skew=1.0).union(16), uniform_union(experts, k, 16)
    union = least + part * (chance - least)
    router = RandomRouter.like(SKEWED, experts, k, union)
    assert router.union(16) == pytest.approx(union, rel=0.05)
    shares = mean_shares(torch.cat(fresh(router, 512)), k)
    assert shares.sum() == pytest.approx(1)
    assert (shares - target_shares(k)).abs().max() < 0.015


def test_the_curve_at_other_k():
    assert target_shares(8).tolist() == pytest.approx(SHARES, abs=1e-3)
    assert target_shares(2).tolist() == pytest.approx([0.57, 0.43])
    longer = target_shares(12)
    assert longer.sum() == pytest.approx(1)
    assert (longer.diff() < 0).all()


def test_a_union_out_of_reach_is_refused():
    for union in (5, 90, -1):
        with pytest.raises(OptionError, match="out of reach"):
            RandomRouter.like(SKEWED, 128, 8, union)
    with pytest.raises(OptionError, match="for --routing skewed"):
        RandomRouter.like(FLAT, 128, 8, 49)


SMALL = {
    "hidden_size": 256, "intermediate_size": 64, "moe_intermediate_size": 8, "vocab_size": 2048, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 128,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [*(("qwen3-30b-a3b", kind) for kind in KINDS), ("gemma-4-26b-a4b", SKEWED)])
def test_a_models_layers_route_as_asked(name, kind):
    """With real inputs in every layer, the router a plain map of a norm (Qwen3) or with a scale of its own (Gemma-4)."""
    changes = {"global_head_dim": 16, "num_global_key_value_heads": 1} if name.startswith("gemma") else {}
    model = shapes.build(name, "cpu", layers=4, **SMALL, **changes)
    router = shape_routers(model, kind)
    ace = ACE(build_plan(model))
    with ace(model):
        routed = observe(model, ace, random_tokens(model)(16, 48), 32, router and router.union)
    assert routed.valid
    assert routed.expected == pytest.approx(49 if kind == SKEWED else uniform_union(128, 8, 16), rel=0.01)
    off = (torch.tensor(routed.shares) - torch.tensor(SHARES)).abs().max()
    assert off < 0.01 if kind in (FLAT, SKEWED) else off > 0.02
