"""The subject of a comparison: a model with its plan and a text, and passes over it that remember what each τ did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
from ...mapping.passes import Counted, Passes
from ...plan import Fingerprint, Plan
from ...policies import Decision, Policy, Routing, TokenPolicy
from ...provenance import provenance
from ...scoring.fidelity import Reference
from ...scoring.losses import Losses
from ...scoring.predictions import score
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


def facts(subject: Subject, name: str, inputs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Collect what a reader of the results needs to know about the run."""
    device, (count, window) = subject.model.device, subject.windows.ids.shape
    record = provenance(device, {"model": subject.plan.fingerprint.routers.exact, **(inputs or {})})
    return {
        "model": {"name": name, "architecture": type(subject.model).__name__},
        "workload": {**asdict(subject.windows.workload), "windows": count, "window": window},
        "environment": {
            **{"ace_moe": record["version"], "torch": torch.__version__, "transformers": transformers.__version__},
            **{"device": device.type, "threads": torch.get_num_threads()},
            **({"card": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        },
        "command": record["command"],
        "provenance": record,
    }


def identity_of(model: PreTrainedModel, fingerprint: Fingerprint | None = None) -> dict[str, Any]:
    """Which model, in which precision, on which kind of device: results of two are never in one file."""
    fingerprint = fingerprint or MoEModel.of(model).fingerprint()
    samples = json.dumps({key: experts.sample for key, experts in fingerprint.experts.items()}, sort_keys=True)
    return {
        "model": fingerprint.routers.name,
        "experts": hashlib.sha256(samples.encode()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }


@dataclass(frozen=True)
class Outcome:
    """One pass of the skipped model: its losses, and the realised ratio in all, by layer, by layer and expert [E].

    None where an expert was not routed to; re-routed slots can make a ratio negative."""

    losses: Losses
    realised: float
    layers: dict[str, float]
    experts: dict[str, list[float | None]]


class Recorder(Passes):
    """Passes under an attached policy that remember, for each τ, what it did."""

    def __init__(self, deciders: Deciders, subject: Subject, faithful: bool = True):
        """`faithful`: passes are compared with the unskipped model's."""
        run = partial(score, whole=self._whole) if faithful else score
        super().__init__(deciders, subject.model, subject.windows, subject.batch, run)
        self.subject = subject
        self.outcomes: dict[float, Outcome] = {}
        self.asked: list[float] = []  # every τ, whether a pass was needed for it or not

    def _whole(self, number: int, ids: Tensor) -> Tensor:
        """The unskipped model's logits of a batch, computed beside the pass that asks where they were not kept."""
        return self.subject.reference.of(number, lambda: self.whole(ids))

    def __call__(self, threshold: float) -> Histogram:
        """Run a pass and return what the slots contributed. Where the ratio alone counts, a τ that was tried is not run again."""
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
        """One pass; its slots are counted by expert as well, without waiting for the device."""
        deciders = self.deciders
        counted = {key: one.counts.new_zeros(2, one.skipped + 1) for key, one in deciders.items()}  # routed, executed

        def add(key: str, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
            executed = torch.where(decision.keep, decision.ids, deciders[key].skipped)
            both = torch.stack([routing.ids, executed]).flatten(1).long()
            counted[key].scatter_add_(1, both, torch.ones_like(both))

        with deciders.observed(lambda key: partial(add, key)):
            contributions = super().__call__(threshold)
        by_layer = {key: ratio(counts.sum(0)) for key, counts in self.deciders.counts().items()}
        by_expert: dict[str, list[float | None]] = {}
        for key, counts in counted.items():
            pairs = zip(*counts[:, :-1].tolist(), strict=True)
            by_expert[key] = [round(1 - ran / routed, 4) if routed else None for routed, ran in pairs]
        self.outcomes[threshold] = Outcome(self.results[threshold], self.deciders.realised, by_layer, by_expert)
        return contributions


def by_quantile(policy: Policy) -> TypeGuard[TokenPolicy]:
    """True if one dense pass maps this policy's budgets."""
    return isinstance(policy, TokenPolicy) and policy.mapping == "quantile"
