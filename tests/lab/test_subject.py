"""Passes that comparisons share give what each policy's own passes give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ace_moe import ACE
from ace_moe.lab.compare.subject import Recorder, Subject, by_quantile, identity_of
from ace_moe.mapping import Passes, fit_budgets
from ace_moe.mapping.passes import attached, observe
from ace_moe.plan import Plan
from ace_moe.policies import Routing, Share, make
from ace_moe.scoring.predictions import score
from ace_moe.text import Windows

EDGE = 100 / 1024  # of a bin of the histogram: there its ratio is exact


@pytest.fixture
def subject(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Subject:
    return Subject(demo_model, demo_plan, demo_windows)


def untouched(model: PreTrainedModel) -> bool:
    return not any(hasattr(module, "ace") for module in model.modules())


def test_one_dense_pass_equals_each_policys_own(subject: Subject) -> None:
    """Histograms bit for bit, and the unskipped model's score; the model is as it was afterwards."""
    policies = {name: make(name) for name in ("ace", "share", "rcr")}
    dense, seen = observe(subject.model, subject.plan, policies, lambda: score(subject.model, subject.windows))
    assert dense.nll == score(subject.model, subject.windows).nll
    for name, policy in policies.items():
        ace = ACE(subject.plan, policy=policy)
        with ace(subject.model):
            own = Passes(ace.deciders, subject.model, subject.windows)(0.0)
        assert torch.equal(seen[name].bins, own.bins), name
    assert untouched(subject.model)


def test_the_model_is_restored_after_an_error(subject: Subject) -> None:
    class Broken(Share):
        def contribution(self, routing: Routing) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        observe(subject.model, subject.plan, {"broken": Broken()}, lambda: score(subject.model, subject.windows))
    assert untouched(subject.model)


def test_recorder_keeps_what_each_threshold_did(subject: Subject) -> None:
    """Ratios by layer and by expert add up to the realised ratio."""
    ace = ACE(subject.plan, policy="share")
    with ace(subject.model):
        passes = Recorder(ace.deciders, subject)
        ratio = passes(EDGE).ratio(EDGE)
        found = passes.outcome(EDGE)
        assert passes.count == 1
    assert found.realised == pytest.approx(ratio, abs=1e-9)
    assert sum(found.layers.values()) / 6 == pytest.approx(found.realised)
    assert all(len(layer) == 32 for layer in found.experts.values())
    assert all(0 <= value <= 1 for layer in found.experts.values() for value in layer if value is not None)


@pytest.mark.parametrize("name", ["share", "alloc_t"])
def test_budgets_are_met_by_quantile_and_by_search(subject: Subject, name: str) -> None:
    """A token policy starts from the dense histogram; a policy without contributions is searched, no τ twice."""
    policy = make(name)
    watchers = {name: policy} if by_quantile(policy) else {}
    _, seen = observe(subject.model, subject.plan, watchers, lambda: score(subject.model, subject.windows))
    ace = ACE(subject.plan, policy=policy)
    with ace(subject.model):
        passes = Recorder(ace.deciders, subject)
        found = fit_budgets(passes, [0.5], dense=seen.get(name))[0]
        assert passes.outcome(found.threshold).realised == pytest.approx(0.5, abs=0.003)
        assert passes.count == len(passes.outcomes) and set(passes.asked) == set(passes.outcomes)


def test_steps_are_measured_once(subject: Subject) -> None:
    """Two slots of eight or three: 30 % is not there, and no correction brings it closer."""
    ace = ACE(subject.plan, policy=make("fixed"))
    with ace(subject.model):
        passes = Recorder(ace.deciders, subject)
        assert fit_budgets(passes, [0.3], dense=passes(0.0))[0].realised == 0.25
    assert passes.count == 2


def test_an_attached_model_is_known_as_itself(demo_model: PreTrainedModel, demo_plan: Plan) -> None:
    """Harnesses attach before they are asked who they are; other experts are another model."""
    alone = identity_of(demo_model)
    with attached(demo_model, demo_plan, make("share")):
        assert identity_of(demo_model) == alone
    other = copy.deepcopy(demo_model)
    with torch.no_grad():
        next(p for n, p in other.named_parameters() if n.endswith("down_proj")).mul_(0.2)
    assert {k for k, v in identity_of(other).items() if v != alone[k]} == {"experts"}
