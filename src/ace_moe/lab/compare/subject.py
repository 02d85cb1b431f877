"""What a comparison measures: a model with its plan and a text, and passes over it that remember what each τ did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ...checkpoint import MoEModel
from ...decider import Deciders
from ...decider.report import ratio
from ...mapping.fit import Histogram
from ...mapping.passes import Counted, Passes, attached, observe
from ...plan import Plan
from ...policies import Decision, Policy, Routing, TokenPolicy
from ...provenance import provenance
from ...scoring.fidelity import Reference
from ...scoring.predictions import Score, score
from ...text import Windows


@dataclass(frozen=True)
class Subject:
    """A model with its plan and a text: what every pass of a comparison has in common."""

    model: PreTrainedModel
    plan: Plan
    windows: Windows
    batch: int = 1
    calibration: Windows | None = None  # text for the policies that need one
    reference: Reference = field(default_factory=Reference)  # the unskipped model's predictions

    def under(self, policy: Policy, plan: Plan | None = None) -> AbstractContextManager[Deciders]:
        """The policy in the model, on the torch path: kernels know some policies only, and rounding would differ."""
        return attached(self.model, plan or self.plan, policy)


def facts(subject: Subject, name: str, inputs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a reader of the results needs to know about the run."""
    device, (count, window) = subject.model.device, subject.windows.ids.shape
    made = provenance(device, {"model": subject.plan.fingerprint.routers.exact, **(inputs or {})})
    return {
        "model": {"name": name, "architecture": type(subject.model).__name__},
        "workload": {**asdict(subject.windows.workload), "windows": count, "window": window},
        "environment": {
            **{"ace_moe": made["version"], "torch": torch.__version__, "transformers": transformers.__version__},
            **{"device": device.type, "threads": torch.get_num_threads()},
            **({"card": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        },
        "command": made["command"],
        "provenance": made,
    }


def identity_of(model: PreTrainedModel) -> dict[str, Any]:
    """Which model, in which precision, on which kind of device: results of two are never in one file."""
    found = MoEModel.of(model).fingerprint()
    samples = json.dumps({key: s.sample for key, s in found.experts.items()}, sort_keys=True)
    return {
        "model": found.routers.name,
        "experts": hashlib.sha256(samples.encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }


# ---- one dense pass for all ---------------------------------------------------------------------------------------


def dense_pass(subject: Subject, policies: Mapping[str, TokenPolicy]) -> tuple[Score, dict[str, Histogram]]:
    """The unskipped model's score, and what every policy's slots contributed in that one pass."""
    read = partial(score, subject.model, subject.windows, subject.batch, keep=subject.reference)
    return observe(subject.model, subject.plan, policies, read)


# ---- passes that remember -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One pass of the skipped model: its score, and the realised ratio in all, by layer, by layer and expert [E]."""

    score: Score
    realised: float
    layers: dict[str, float]
    experts: dict[str, list[float | None]]


class Recorder(Passes):
    """Passes under an attached policy that remember, for each τ, what it did."""

    def __init__(self, deciders: Deciders, subject: Subject, faithful: bool = True):
        """`faithful`: whether passes are held against the unskipped model."""
        run = partial(score, whole=self._whole) if faithful else score
        super().__init__(deciders, subject.model, subject.windows, subject.batch, run)
        self.subject = subject
        self.outcomes: dict[float, Outcome] = {}
        self.asked: list[float] = []  # every τ, whether a pass was needed for it or not

    def _whole(self, number: int, ids: Tensor) -> Tensor:
        """The unskipped model's logits of a batch, computed beside the pass that asks where they were not kept."""
        return self.subject.reference.of(number, lambda: self.whole(ids))

    def __call__(self, threshold: float) -> Histogram:
        """What the slots contributed. Where the ratio alone counts, a τ that was tried is not run again."""
        if by_quantile(self.policy):
            self.asked.append(threshold)
            return self._run(threshold)
        return Counted(self.outcome(threshold).realised)

    def outcome(self, threshold: float) -> Outcome:
        self.asked.append(threshold)
        if threshold not in self.outcomes:
            self._run(threshold)
        return self.outcomes[threshold]

    def _run(self, threshold: float) -> Histogram:
        with _by_expert(self.deciders) as counted:
            seen = super().__call__(threshold)
        layers = {key: ratio(c.sum(0)) for key, c in self.deciders.counts().items()}
        experts = {key: _ratios(counts) for key, counts in counted.items()}
        self.outcomes[threshold] = Outcome(self.results[threshold], self.deciders.realised, layers, experts)
        return seen


def by_quantile(policy: Policy) -> TypeGuard[TokenPolicy]:
    """Whether one dense pass maps this policy's budgets."""
    return isinstance(policy, TokenPolicy) and policy.mapping == "quantile"


@contextmanager
def _by_expert(deciders: Deciders) -> Iterator[dict[str, Tensor]]:
    """Routed and executed slots by expert, [2, E + 1] for each layer; they grow inside, without a host sync."""
    counted = {key: layer.counts.new_zeros(2, layer.skipped + 1) for key, layer in deciders.items()}

    def add(key: str, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
        ran = torch.where(decision.keep, decision.ids, deciders[key].skipped)
        both = torch.stack([routing.ids, ran]).flatten(1).long()
        counted[key].scatter_add_(1, both, torch.ones_like(both))

    with deciders.observed(lambda key: partial(add, key)):
        yield counted


def _ratios(counted: Tensor) -> list[float | None]:
    """Realised ratio of each expert's slots; None where no slot was routed. Re-routed slots can make it negative."""
    routed, executed = counted[:, :-1].tolist()
    return [round(1 - done / all_, 4) if all_ else None for all_, done in zip(routed, executed, strict=True)]
