"""The true norms of expert outputs, and what tables know of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ace_moe.lab.compare.oracle import by_expert, correlation, observed, table_correlation
from ace_moe.lab.policies.calls import answers
from ace_moe.plan import Plan
from ace_moe.text import Windows


def test_norms_are_those_of_each_experts_own_output(demo_model: PreTrainedModel) -> None:
    """Against the expert written out: down(silu(gate x) · up x), slot by slot, gates left out."""
    experts = demo_model.get_submodule("model.layers.1.mlp.experts")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 192, generator=generator).to(demo_model.dtype)
    ids = torch.stack([torch.randperm(32, generator=generator)[:8] for _ in range(5)])
    with torch.no_grad():
        found = answers(experts, hidden, ids).norm(dim=-1)
        for t in range(5):
            for j, expert in enumerate(ids[t].tolist()):
                gate, up = (hidden[t].float() @ experts.gate_up_proj[expert].float().T).chunk(2)
                wanted = (F.silu(gate) * up) @ experts.down_proj[expert].float().T
                torch.testing.assert_close(found[t, j], wanted.norm(), rtol=0.02, atol=1e-3)


def test_hooks_go_away(demo_model: PreTrainedModel, demo_windows: Windows) -> None:
    """While open every layer is seen; afterwards nothing is, also after an error."""
    ids = demo_windows.ids[:1, :16]
    try:
        with observed(demo_model) as seen, torch.no_grad():
            demo_model(input_ids=ids)
            raise KeyError
    except KeyError:
        pass
    assert {key: tuple(passes[0][1].shape) for key, passes in seen.items()} == dict.fromkeys("012345", (16, 8))
    before = {key: len(passes) for key, passes in seen.items()}
    with torch.no_grad():
        demo_model(input_ids=ids)
    assert {key: len(passes) for key, passes in seen.items()} == before


def test_a_table_of_the_truth_correlates_fully() -> None:
    """Slots whose norm is their expert's number: all four are 1; the reverse order: Spearman −1."""
    table = torch.tensor([1.0, 2.0, 4.0])
    ids = torch.tensor([0, 1, 2, 2, 1, 0])
    found = correlation(table, ids, table[ids])
    assert all(abs(value - 1) < 1e-6 for value in found.values())
    assert abs(correlation(table, ids, 1 / table[ids])["spearman"] + 1) < 1e-6


def test_one_pass_over_the_demo(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> None:
    """Every layer and table; GSP knows something of this model."""
    found = table_correlation(demo_model, by_expert(demo_plan), demo_windows)
    assert list(found) == list("012345")
    assert all(set(layer) == {"gsp", "rcr"} for layer in found.values())
    assert sum(layer["gsp"]["pearson"] for layer in found.values()) / 6 > 0.1
    assert all(-1 <= value <= 1 for layer in found.values() for table in layer.values() for value in table.values())
