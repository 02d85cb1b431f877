"""Passes of a model over a text under a policy: what its slots contributed, what was skipped, what that did to predictions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import progress
from ..checkpoint import MoEModel, Site
from ..decider import Deciders
from ..engines.transformers import Attachment
from ..plan import Plan
from ..policies import Decision, Policy, Routing, TokenPolicy
from ..scoring.fidelity import Fidelity, compare
from ..scoring.predictions import predict
from ..scoring.statistics import token_interval
from ..text import Windows
from .fit import Histogram

JUDGED_ON = 16  # windows: enough for an interval, few beside the passes that map
Run = Callable[[PreTrainedModel, Windows, int], Any]  # reads a text in batches of windows


@torch.inference_mode()
def read_through(model: PreTrainedModel, windows: Windows, batch: int = 1) -> None:
    """The model over the text, its predictions not computed where it can do without."""
    short = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with progress.task("windows", len(windows.ids)) as task:
        for ids in windows.batches(batch):
            model(input_ids=ids.to(model.device), use_cache=False, **short)
            task.advance(len(ids))


@contextmanager
def attached(model: PreTrainedModel, plan: Plan, policy: Policy, sites: list[Site] | None = None) -> Iterator[Deciders]:
    """The policy in the model, on the torch path: mapping looks at contributions there. `sites`, if they are known: finding
    them takes a twin of the model."""
    deciders = Deciders(plan, policy)
    attachment = Attachment(model, deciders, MoEModel.of(model).sites if sites is None else sites, "torch")
    try:
        yield deciders
    finally:
        attachment.remove()


@dataclass(eq=False)
class Passes:
    """Passes over one text under a policy that is attached; `run` reads the text, `results` are what it returned by τ."""

    deciders: Deciders
    model: PreTrainedModel
    windows: Windows
    batch: int = 1
    run: Run = read_through
    results: dict[float, Any] = field(default_factory=dict)
    count: int = 0

    @property
    def policy(self) -> Policy:
        return self.deciders.policy

    def set(self, threshold: float) -> None:
        """This τ in every phase; counters start anew."""
        self.deciders.set(torch.full((3,), threshold))
        self.deciders.reset()

    def whole(self, ids: Tensor) -> Tensor:
        """The unskipped model's logits [B, L, V]; nothing of it is counted."""
        with self.deciders.bypass():
            return predict(self.model, ids)

    def __call__(self, threshold: float) -> Histogram:
        """What the slots contributed at this τ; policies without contributions say what they skipped."""
        self.set(threshold)
        self.count += 1
        if self.policy.mapping != "quantile":
            self.results[threshold] = self.run(self.model, self.windows, self.batch)
            return Counted(self.deciders.realised)
        seen = Histogram()

        def observer(routing: Routing, protected: Tensor | None, decision: Decision) -> None:
            assert protected is not None
            seen.add(protected, routing.token_mask)

        with self.deciders.observed(lambda key: observer):
            self.results[threshold] = self.run(self.model, self.windows, self.batch)
        return seen


class Counted(Histogram):
    """The ratio that one pass realised, from the counters: for policies that have no contributions to look at."""

    def __init__(self, realised: float):
        self.realised = realised

    def ratio(self, threshold: float) -> float:
        return self.realised


# ---- what thresholds do to predictions -------------------------------------------------------------------------------------


@torch.inference_mode()
def judge(
    model: PreTrainedModel, plan: Plan, policy: Policy, windows: Windows, taus: Sequence[float], batch: int = 1
) -> list[dict[str, Any]]:
    """KL, agreement and acceptance at each τ with their intervals; one batch of logits is in memory at a time."""
    part, found = windows.ids[:JUDGED_ON], [Fidelity() for _ in taus]
    with attached(model, plan, policy) as deciders, progress.task("fidelity", len(part)) as task:
        passes = Passes(deciders, model, windows, batch)
        for ids in part.split(batch):
            whole = passes.whole(ids)
            for tau, sums in zip(taus, found, strict=True):
                passes.set(tau)
                sums.add(compare(whole, predict(model, ids)))
            task.advance(len(ids))
    return [_means(sums, part.shape[1] - 1) for sums in found]


def _means(sums: Fidelity, tokens: int) -> dict[str, Any]:
    weights = [tokens] * len(sums.kl)
    means = {name: asdict(token_interval(values, weights)) for name, values in vars(sums).items()}
    return {**means, "windows": len(weights), "tokens": sum(weights)}


# ---- one dense pass for many policies ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Everything(Policy):
    """Skips nothing: other policies look on."""

    name = "everything"

    def route(self, routing: Routing) -> Decision:
        return Decision(routing.ids, routing.gates, torch.ones_like(routing.ids, dtype=torch.bool))


def observe(
    model: PreTrainedModel, plan: Plan, policies: Mapping[str, TokenPolicy], read: Callable[[], Any]
) -> tuple[Any, dict[str, Histogram]]:
    """What every policy's slots contribute in one pass of the unskipped model, and what `read` returned of it."""
    seen, sites = {method: Histogram() for method in policies}, MoEModel.of(model).sites
    with attached(model, plan, Everything(), sites) as deciders, ExitStack() as hooks:
        beside = {method: Deciders(plan, policy) for method, policy in policies.items()}
        for site in sites:
            decider = deciders[site.key]
            for method, other in beside.items():
                extras = policies[method].extras(model, site)
                if extras is not None:
                    hooks.callback(extras.remove)
                other.add(site.key, skipped=decider.skipped, device=decider.counts.device, extras=extras)

        def see(key: str, routing: Routing, protected: Tensor | None, decision: Decision) -> None:
            for method, other in beside.items():
                seen[method].add(other[key].protected(routing), routing.token_mask)

        with deciders.observed(lambda key: partial(see, key)):
            return read(), seen
