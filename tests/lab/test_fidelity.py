"""KL, agreement and acceptance against plain sums, and of a skipped model against the unskipped one."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ace_moe.lab.compare.subject import Recorder, Subject
from ace_moe.mapping.passes import attached
from ace_moe.plan import Plan
from ace_moe.policies import make
from ace_moe.scoring import fidelity
from ace_moe.scoring.fidelity import Fidelity, Reference, compare
from ace_moe.scoring.predictions import score
from ace_moe.text import Windows


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1 << 26, 1, 50])
def test_against_plain_sums(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formulas, token by token in float64; the last token has no part; chunks change nothing."""
    monkeypatch.setattr(fidelity, "CACHED", chunk)
    whole, skipped = random_logits(2, 7, 11), random_logits(2, 7, 11, seed=1)
    found = compare(whole, skipped)
    for b in range(2):
        kl = same = accepted = 0.0
        for t in range(6):
            p, q = whole[b, t].double().softmax(-1), skipped[b, t].double().softmax(-1)
            kl += float((p * (p / q).log()).sum())
            same += float(p.argmax() == q.argmax())
            accepted += float(torch.minimum(p, q).sum())
        assert found[b].tolist() == pytest.approx([kl, same, accepted], rel=1e-5)


def test_a_model_against_itself() -> None:
    logits = random_logits(1, 5, 9)
    assert compare(logits, logits)[0].tolist() == pytest.approx([0, 4, 4], abs=1e-6)
    shifted = compare(logits, logits + 7)[0]
    assert shifted[0] >= 0 and shifted.tolist() == pytest.approx([0, 4, 4], abs=1e-5)


def test_references_are_bounded() -> None:
    """What does not fit is computed again, and only that."""
    one = random_logits(1, 4, 8)
    reference, asked = Reference(room=2 * one.numel() * 4), []

    def compute() -> torch.Tensor:
        asked.append(1)
        return one

    for _ in range(3):
        for number in range(3):
            assert torch.equal(reference.of(number, compute), one)
    assert len(asked) == 2 + 3, "two kept, the third three times"


@pytest.fixture
def subject(demo_model: PreTrainedModel, demo_plan: Plan, demo_windows: Windows) -> Subject:
    return Subject(demo_model, demo_plan, demo_windows)


def under_share(subject: Subject) -> AbstractContextManager[Any]:
    return attached(subject.model, subject.plan, make("share"))


def test_threshold_zero_is_the_unskipped_model(subject: Subject) -> None:
    with under_share(subject) as deciders:
        found = Recorder(deciders, subject).outcome(0.0).losses.fidelity
    assert found is not None
    assert found.kl == [0.0] * 4 and found.agreement == [255.0] * 4
    assert found.acceptance == pytest.approx([255.0] * 4, rel=1e-5)


def test_kept_and_computed_references_agree(subject: Subject) -> None:
    """From the dense pass, or beside the pass that asks: the same to the bit, and nothing of it is counted or observed."""
    cramped = replace(subject, reference=Reference(room=0))
    score(subject.model, subject.windows, keep=subject.reference)
    found = []
    for one in (subject, cramped):
        with under_share(one) as deciders:
            passes = Recorder(deciders, one)
            outcome = passes.outcome(0.12)
            found.append((outcome.losses.fidelity, outcome.realised, outcome.experts, passes(0.12).routed))
    assert found[0] == found[1]
    kl = found[0][0]
    assert isinstance(kl, Fidelity) and all(x > 0 for x in kl.kl)


def test_kl_grows_with_the_budget_and_tells_models_apart(subject: Subject, demo_model: PreTrainedModel) -> None:
    with under_share(subject) as deciders:
        passes = Recorder(deciders, subject)
        sums = [sum(passes.outcome(tau).losses.fidelity.kl) for tau in (0.05, 0.1, 0.15)]  # type: ignore[union-attr]
    assert sums == sorted(sums)
    whole = []
    score(demo_model, subject.windows, keep=(kept := Reference()))
    other = copy.deepcopy(demo_model)
    with torch.no_grad():
        other.model.layers[3].mlp.experts.down_proj.mul_(1.5)
    against = score(other, subject.windows, whole=lambda n, ids: kept.of(n, lambda: whole.append(n) or ids))
    assert whole == [] and against.fidelity is not None and sum(against.fidelity.kl) > 0
