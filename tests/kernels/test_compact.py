"""Kept slots alone on the CPU: the same as the stock function with sentinels, on fewer rows, and which path a family takes."""

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

import zoo
from ace_moe.checkpoint.model import MoEModel
from ace_moe.dispatch import on_gpu
from ace_moe.dispatch.compact import applies, compact


@pytest.fixture(scope="module")
def experts():
    module = zoo.build("qwen3_moe").model.layers[1].mlp.experts
    if hasattr(module, "_is_expert_parallel"):
        module._is_expert_parallel = True  # stock masks sentinel rows under this flag
    return module


@torch.no_grad()
@pytest.mark.parametrize("skipped", [0.0, 0.5, 1.0])
def test_the_same_as_with_sentinels(experts, skipped):
    g = torch.Generator().manual_seed(0)
    e, rows = experts.num_experts, []
    hidden = torch.randn(11, experts.gate_up_proj.shape[2], generator=g)
    ids = torch.rand(11, e, generator=g).argsort(1)[:, :4]
    ids = torch.where(torch.rand(11, 4, generator=g) < skipped, e, ids)
    gates = torch.rand(11, 4, generator=g)

    def counted(module, hidden, ids, gates):
        rows.append(ids.numel())
        return grouped_mm_experts_forward(module, hidden, ids, gates)

    found = compact(counted, experts, hidden, ids, gates, e)
    expected = grouped_mm_experts_forward(experts, hidden, ids, gates)
    assert torch.equal(found, expected) if skipped == 0 else torch.allclose(found, expected, atol=1e-5)
    kept = int((ids < e).sum())
    assert rows == ([kept] if kept else []), "one call with the kept slots, none for nothing"


def test_only_where_shapes_may_follow_the_data():
    assert applies(torch.zeros(1))
    assert not applies(torch.zeros(1, device="meta"))


@pytest.mark.parametrize(
    ("name", "path"),
    [("qwen3_moe", "kernels"), ("gpt_oss", "kernels"), ("gemma4", "kernels"), ("nemotron_h", "kernels")],
)
def test_which_path_on_a_gpu(name, path):
    pytest.importorskip("triton")
    assert on_gpu(MoEModel.of(zoo.build(name)).sites[0].experts) == path
