"""The decode step under torch.compile(fullgraph=True) with a static cache, for the three target families."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import StaticCache

import zoo
from ace_moe import ACE, build_plan

pytestmark = pytest.mark.long

TARGETS = ["qwen3_moe", "qwen3_5_moe", "gemma4"]
TWO_LAYERS = {"qwen3_5_moe": ["linear_attention", "full_attention"], "gemma4": ["sliding_attention", "full_attention"]}
PROMPT, STEPS = 6, 3


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """bf16 casts are kept where eager has them, on both sides: inductor otherwise fuses them away."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        yield
    torch._dynamo.reset()


@torch.no_grad()
def decode(model, step):
    """Prefill without compiling, then a few tokens through `step`; the logits of each."""
    ids = zoo.inputs(batch=2, tokens=PROMPT + STEPS)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(input_ids=ids[:, :PROMPT], past_key_values=cache)
    logits = []
    for position in range(PROMPT, PROMPT + STEPS):
        at = torch.full((2, 1), position)
        logits.append(
            step(input_ids=ids[:, position : position + 1], past_key_values=cache, position_ids=at).logits.clone()
        )
    return torch.stack(logits)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", [*TARGETS[:2], pytest.param("gemma4", marks=pytest.mark.slow)])
def test_compiled_threshold_zero_is_compiled_stock(name, dtype):
    layers = {"layer_types": TWO_LAYERS[name]} if name in TWO_LAYERS else {}
    model = zoo.build(name, dtype, num_hidden_layers=2, **layers)
    model.set_experts_implementation("grouped_mm")
    stock = decode(model, torch.compile(model, fullgraph=True))
    torch._dynamo.reset()
    with ACE(build_plan(model))(model) as ace:
        ours = decode(model, torch.compile(model, fullgraph=True))
        assert ace.report()["decode"]["routed"] == 2 * STEPS * zoo.TOP_K * len(ace.deciders)
    assert torch.equal(stock, ours)


@pytest.mark.parametrize("name", TARGETS)
def test_another_budget_compiles_nothing_and_matches_eager(name):
    model = zoo.build(name)
    counter = CompileCounter()
    with ACE(build_plan(model))(model) as ace:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        decode(model, compiled)
        graphs = counter.frame_count
        for tau in (0.0, 0.2, 0.3):
            ace.set_threshold(tau)
            ace.reset()
            fast = decode(model, compiled)
            assert counter.frame_count == graphs, "a change of budget compiled again"
            kept = ace.report()["decode"]["kept"]
            ace.reset()
            torch.testing.assert_close(fast, decode(model, model))
            assert ace.report()["decode"]["kept"] == kept
    assert ace.realised > 0.1
