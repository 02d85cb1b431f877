"""On a GPU: one captured graph serves every step, and telling it what a step holds keeps nobody waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from serving_parts import EXPERTS, TOP_K, layer, routing, step
from torch import Tensor

from ace_moe.decider import Decider
from ace_moe.engines.vllm.skipping import SKIPPED
from ace_moe.engines.vllm.steps import Step, TokenClasses

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
TOKENS = 16  # of the captured size; steps have fewer
STEPS: list[tuple[Step, list[float]]] = [
    (step([1] * 16, 9, 4), [0.0, 0.1, 0.18, 0.14]),
    (step([1] * 11, 9, 4), [0.0, 0.1, 0.18, 0.14]),
    (step([5, 1, 3], [0, 9, 9], [5, 4, 4], [0, 0, 2]), [0.0, 0.1, 0.18, 0.14]),
    (step([5, 1, 3], [0, 9, 9], [5, 4, 4], [0, 0, 2]), [0.0, 0.0, 0.25, 0.05]),
    (step([1] * 3, 9, 4), [0.0, 0.0, 0.0, 0.0]),
]


def captured(run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], int]:
    """The graph, its outputs, and how many tensors were made in it."""
    run()  # kernels compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = run()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    return graph, out, made


def check(own: Decider, graph: torch.cuda.CUDAGraph, out: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]) -> None:
    """Every step by replay, against the rule in torch on the host."""
    theirs: Any = layer()
    own.counts.zero_()
    for now, tau in STEPS:
        for each in (own, theirs):
            each.state.set(torch.tensor(tau))
            each.tokens.mark(now)
        graph.replay()
        ids, gates = theirs.decide(*given)
        real = int(now.lengths.sum())
        found = [o.cpu() for o in out]
        assert torch.equal(found[0][:real], ids[:real]) and (found[0][real:] == SKIPPED).all()
        torch.testing.assert_close(found[1][:real], gates[:real], rtol=1e-5, atol=1e-6)
        assert (found[1][real:] == 0).all()
    assert torch.equal(own.counts.cpu(), theirs.counts) and int(theirs.counts.sum()) > 0


@needs_gpu
def test_the_rule_behind_a_router() -> None:
    own, given = layer(kernels=True, device="cuda"), routing(TOKENS)
    on_gpu = [t.cuda() for t in given]
    graph, out, made = captured(lambda: own.decide(*on_gpu))
    assert made == 2  # ids and gates, nothing beside
    check(own, graph, out, given)


@needs_gpu
def test_the_rule_and_its_router_in_one() -> None:
    from ace_moe.kernels.routing import TopK

    own, logits = layer(kernels=True, device="cuda"), torch.randn(TOKENS, EXPERTS, device="cuda")
    gates, ids = logits.cpu().softmax(-1).topk(TOP_K)
    kind = TopK(TOP_K, False, True)
    graph, out, made = captured(lambda: own.route(logits, kind, torch.float32, torch.int32))
    assert made == 2
    check(own, graph, out, (ids.int(), gates / gates.sum(-1, keepdim=True)))


@needs_gpu
@pytest.mark.parametrize("tokens", [256, 100_000])
def test_marking_does_not_wait_for_the_gpu(tokens: int) -> None:
    """The step before is still running: what it reads must not change under it, and the host goes on."""
    classes = TokenClasses(100_000, "cuda")
    classes.mark(step([tokens], 0, tokens))
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    seen = classes.rows(8, classes.buffer.device).clone()
    began = time.perf_counter()
    classes.mark(step([tokens], 9, 4))
    waited = time.perf_counter() - began
    assert not torch.cuda.current_stream().query() and waited < 0.05, waited
    assert (seen == 1).all() and (classes.buffer[:8] == 2).all()
    print(f"\n{tokens} tokens: marked in {waited * 1e6:.0f} µs beside a busy GPU")
