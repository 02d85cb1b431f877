"""A policy simulated on a trace: slots run and experts read, computed from ids and gates alone. No weights are needed.

A trace was taken under some budget; the states of a model that skips more differ a little, which a simulation cannot see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import rule
from ...budget import check_budget
from ...decider import Deciders
from ...decider.rows import PHASES
from ...engines.traces.record import Trace
from ...errors import OptionError, PolicyError, TraceError, out_of_reach
from ...mapping.fit import Histogram
from ...plan import Plan
from ...policies import Policy, Routing, TokenPolicy
from ...tables.build import check_tables
from ..policies.batch import marked

STEPS = 256  # random steps of each size


@dataclass(frozen=True)
class Ranks:
    """Means of a layer's step by rank, experts in contiguous blocks; `busiest` of the rank with the most reads in each."""

    reads: list[float]
    slots: list[float]
    busiest: float


@dataclass(frozen=True)
class StepCounts:
    """Means over steps and layers. `slots` and `restored` are parts of the routed slots that run, without and with restore;
    `asked` and `reads` are experts a layer reads, unskipped and skipped: restore adds none."""

    slots: float
    restored: float
    asked: float
    reads: float
    ranks: Ranks | None = None


class Simulation:
    """A policy on a trace: `threshold` maps a budget, `steps` draws decode steps, `count` says what they run and read."""

    def __init__(self, trace: Trace, policy: Policy, plan: Plan | None = None):
        self.trace = trace
        self.protected = _protected(trace, _checked(trace, policy, plan), plan)  # [T, k] by layer
        self.min_active, self.seen = policy.min_active, Histogram()
        for protected in self.protected.values():
            self.seen.add(protected)

    def threshold(self, skip: float) -> float:
        """τ by quantile on the whole trace."""
        check_budget(skip, self.trace.top_k, self.min_active)
        if skip > self.seen.limit:
            raise out_of_reach(skip, self.seen.limit, "of this trace")
        return self.seen.threshold(skip)

    def ratio(self, threshold: float) -> float:
        """The part of all routed slots that is skipped."""
        return self.seen.ratio(threshold)

    def steps(self, batch: int, seed: int = 0) -> Tensor:
        """[STEPS, batch]: tokens of different requests. Generated tokens where the trace has any, else all."""
        at, counts = self._by_request()
        if not 1 <= batch <= len(counts):
            raise OptionError(
                f"A step of {batch} needs as many requests, the trace has {len(counts)}. Ask for a smaller --batch, or trace "
                "more requests."
            )
        generator = torch.Generator().manual_seed(seed)
        requests = torch.rand(STEPS, len(counts), generator=generator).argsort(-1)[:, :batch]
        place = (torch.rand(STEPS, batch, generator=generator, dtype=torch.float64) * counts[requests]).long()
        return at[counts.cumsum(0)[requests] - counts[requests] + place]

    def _by_request(self) -> tuple[Tensor, Tensor]:
        """Tokens that steps may have, request by request, and how many each request has."""
        generated = self.trace.phases == PHASES.index("decode")
        at = (generated if generated.any() else torch.ones_like(generated)).nonzero().flatten()
        requests = self.trace.requests[at]
        return at[requests.argsort(stable=True)], requests.unique(return_counts=True)[1]

    def count(self, threshold: float, steps: Tensor, ranks: int | None = None) -> StepCounts:
        """steps [N, B] of tokens."""
        found = [self._layer(key, threshold, steps, ranks) for key in self.trace.layers]
        slots, restored, asked, reads = torch.stack([numbers for numbers, _ in found]).mean(0).tolist()
        shares = [share for _, share in found if share is not None]
        return StepCounts(slots, restored, asked, reads, _ranks(torch.stack(shares).mean(0)) if shares else None)

    def _layer(self, key: str, threshold: float, steps: Tensor, ranks: int | None) -> tuple[Tensor, Tensor | None]:
        """slots, restored, asked and reads of one layer, [4]; by rank [2R + 1] reads, slots and the busiest one's reads."""
        experts, ids = self.trace.experts(key), self.trace.layers[key].ids[steps].flatten(1).long()
        keep = rule.kept(self.protected[key][steps], threshold).flatten(1)
        read, asked = marked(ids, keep, experts) > 0, marked(ids, torch.ones_like(keep), experts)
        restored = keep | read.gather(1, ids)
        parts = [part.double().mean() for part in (keep, restored, asked.sum(1), read.sum(1))]
        return torch.stack(parts), None if ranks is None else _by_rank(ids, keep, read, experts, ranks)


def _by_rank(ids: Tensor, keep: Tensor, read: Tensor, experts: int, ranks: int) -> Tensor:
    if not 1 <= ranks <= experts:
        raise OptionError(f"{experts} experts cannot be placed on {ranks} ranks. Choose another --ranks.")
    rank = torch.arange(experts) * ranks // experts
    reads = torch.zeros(len(ids), ranks, dtype=torch.float64).index_add_(1, rank, read.double())
    slots = torch.zeros(len(ids), ranks, dtype=torch.float64).scatter_add_(1, rank[ids], keep.double())
    return torch.cat([reads.mean(0), slots.mean(0), reads.max(1).values.mean().view(1)])


def _ranks(means: Tensor) -> Ranks:
    *both, busiest = means.tolist()
    half = len(both) // 2
    return Ranks(both[:half], both[half:], busiest)


# ---- policies on a trace ----------------------------------------------------------------------------------------------


def _checked(trace: Trace, policy: Policy, plan: Plan | None) -> TokenPolicy:
    """The policy, if ids, gates and tables are all it needs."""
    if not isinstance(policy, TokenPolicy) or not policy.by_token:
        raise PolicyError(
            f"Policy {policy.key!r} looks at more than a token's gates and tables, and a trace holds no more. Use a token "
            "policy, such as share."
        )
    if not trace.has_gates and not policy.stepwise:
        raise TraceError(
            f"These are experts without gates, which say the order of slots and no more: policy {policy.key!r} cannot be "
            "simulated, `--policy fixed` can. `ace serve --trace` keeps gates."
        )
    if policy.tables and plan is None:
        raise PolicyError(f"Policy {policy.key!r} reads tables: give their plan with --plan, or take --policy share.")
    return policy


def _protected(trace: Trace, policy: TokenPolicy, plan: Plan | None) -> dict[str, Tensor]:
    """Protected contributions of every slot, [T, k] by layer."""
    if plan is not None and trace.fingerprint is not None:
        plan.check_model(trace.fingerprint)
        check_tables(plan, policy)
    if plan is None or trace.fingerprint is None:
        return {key: policy.protected(_routing(ids, gates)) for key, (ids, gates) in trace.layers.items()}
    deciders = Deciders(plan, policy)
    return {
        key: deciders.add(key, experts=trace.experts(key)).protected(_routing(ids, gates))
        for key, (ids, gates) in trace.layers.items()
    }


def _routing(ids: Tensor, gates: Tensor) -> Routing:
    return Routing(ids.long(), gates.float(), {}, torch.zeros(()))
