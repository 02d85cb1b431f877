"""Passes that comparisons share give what each policy's own passes give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.evaluate.mapping import Bench, Near, Recorder, by_quantile, dense_pass, fit
from ace_moe.offline import Passes
from ace_moe.plan import Plan
from ace_moe.policies import Routing, Share, make
from ace_moe.scoring import score
from ace_moe.text import Windows

EDGE = 100 / 1024  # of a bin of the histogram: there its ratio is exact


@pytest.fixture
def bench(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Bench:
    return Bench(demo_model, demo_plan, demo_windows)


def untouched(model: PreTrainedModel) -> bool:
    return not any(hasattr(module, "ace") for module in model.modules())


def test_one_dense_pass_equals_each_policys_own(bench: Bench) -> None:
    """Histograms bit for bit, and the unskipped model's score; the model is as it was afterwards."""
    voices = {name: make(name) for name in ("ace", "share", "rcr")}
    dense, seen = dense_pass(bench, voices)
    assert dense.nll == score(bench.model, bench.windows).nll
    for name, policy in voices.items():
        ace = ACE(bench.plan, policy=policy)
        with ace(bench.model):
            own = Passes(ace, bench.model, bench.windows)(0.0)
        assert torch.equal(seen[name].bins, own.bins), name
    assert untouched(bench.model)


def test_the_model_is_restored_after_an_error(bench: Bench) -> None:
    class Broken(Share):
        def contribution(self, routing: Routing) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dense_pass(bench, {"broken": Broken()})
    assert untouched(bench.model)


def test_recorder_keeps_what_each_threshold_did(bench: Bench) -> None:
    """Ratios by layer and by expert add up to the realised ratio."""
    ace = ACE(bench.plan, policy="share")
    with ace(bench.model):
        passes = Recorder(ace, bench)
        ratio = passes(EDGE).ratio(EDGE)
        found = passes.outcome(EDGE)
        assert passes.count == 1
    assert found.realised == pytest.approx(ratio, abs=1e-9)
    assert sum(found.layers.values()) / 6 == pytest.approx(found.realised)
    assert all(len(layer) == 32 for layer in found.experts.values())
    assert all(0 <= value <= 1 for layer in found.experts.values() for value in layer if value is not None)


@pytest.mark.parametrize("name", ["share", "alloc_t"])
def test_budgets_are_met_by_quantile_and_by_search(bench: Bench, name: str) -> None:
    """A token policy starts from the dense histogram; a policy without contributions is searched, no τ twice."""
    policy = make(name)
    _, seen = dense_pass(bench, {name: policy} if by_quantile(policy) else {})
    ace = ACE(bench.plan, policy=policy)
    with ace(bench.model):
        passes = Recorder(ace, bench)
        found = fit(passes, 0.5, seen.get(name))
        assert passes.outcome(found.threshold).realised == pytest.approx(0.5, abs=0.003)
        done = passes.count
        near = Near(found.threshold, found.realised)
        assert fit(passes, 0.5, seen.get(name), near=near).threshold == found.threshold
        assert passes.count == done


def test_steps_are_searched_once(bench: Bench) -> None:
    """Two slots of eight or three: 30 % is not there. What one gain found is taken by the next in one pass."""
    found = None
    for gain in ("kept", "power"):
        ace = ACE(bench.plan, policy=make("fixed", gain=gain))
        with ace(bench.model):
            passes = Recorder(ace, bench)
            found = fit(
                passes, 0.3, passes(0.0) if found is None else None, found and Near(found.threshold, found.realised)
            )
            assert found.realised == 0.25
    assert passes.count == 1
