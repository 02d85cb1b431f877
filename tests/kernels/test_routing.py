"""Routing and rule in one kernel, for routers recognised as a plain top-k."""

import os

import pytest
import torch

import zoo

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from ace_moe.checkpoint import MoEModel
from ace_moe.dispatch import FastPath
from ace_moe.kernels.routing import TopK, recognise, reference
from ace_moe.policies import Routing, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", [TopK(4, False, True), TopK(6, False, False), TopK(3, True, True)])
@pytest.mark.parametrize("policy", [make("ace"), make("share", gain="kept", min_active=2)], ids=["ace", "share"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_one_kernel_equals_top_k_and_rule(kind, policy, tokens):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, 20, generator=g).to(DEVICE)
    tables = {n: (torch.rand(20, generator=g) + 0.5).to(DEVICE) for n in ("gsp", "rcr")}
    fast = FastPath(None, policy)
    fast.top_k = kind
    for tau in (0.0, 1.02 / kind.top_k):
        counts, threshold = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor(tau, device=DEVICE)
        ids, gates = fast.route(logits, tables, threshold, None, counts)
        expected_ids, expected = reference(kind, logits)
        decision = policy.route(Routing(expected_ids, expected, tables, threshold))
        assert torch.equal(ids, torch.where(decision.keep, expected_ids, 20))
        torch.testing.assert_close(gates, decision.gates, rtol=1e-5, atol=1e-6)
        assert counts.tolist() == [tokens * kind.top_k, int(decision.keep.sum())]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_moe", TopK(4, False, True)), ("mixtral", TopK(4, False, True)), ("olmoe", TopK(4, False, False)),
        ("deepseek_v3", None), ("gpt_oss", None), ("gemma4", None), ("inkling", None), ("zaya", None),
    ],
)  # fmt: skip
def test_routers_are_recognised_by_behaviour(name, expected):
    """Biases, groups, scales, sinks: anything else keeps its own code."""
    model = zoo.build(name)
    site = MoEModel.of(model).sites[0]
    assert recognise(model.get_submodule(site.router_path), site.top_k) == expected
