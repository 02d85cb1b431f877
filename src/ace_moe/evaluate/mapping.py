"""Passes that comparisons share: one dense pass for all token policies, and passes that remember what each τ did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..ace import ACE
from ..budget import Fit, Histogram
from ..checkpoint import MoEModel
from ..integrations.transformers import Attachment
from ..offline import Counted, Passes, fit_budgets
from ..plan import Plan
from ..policies import Decision, Policy, Routing, TokenPolicy
from ..scoring import Score, score
from ..skipper import Skipper, Step
from ..text import Windows
from ..version import __version__

NEAR = 1e-3  # a tenth of a point of realised ratio
STEADY = 1e-4  # a ratio that moved by less has not moved


@dataclass(frozen=True)
class Bench:
    """A model with its plan and a text: what every pass of a comparison has in common."""

    model: PreTrainedModel
    plan: Plan
    windows: Windows
    batch: int = 1
    calibration: Windows | None = None  # text for the policies that need one
    tick: Callable[[], None] = lambda: None

    def attachable(self, policy: Policy, plan: Plan | None = None) -> ACE:
        """The policy on the torch path: kernels know a few policies only, and rounding would differ between methods."""
        return ACE(plan or self.plan, policy=policy, dispatch="torch")


def facts(bench: Bench, name: str, command: str) -> dict[str, Any]:
    """What a reader of the results needs to know about the run."""
    device, (count, window) = bench.model.device, bench.windows.ids.shape
    card = {"card": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "model": {"name": name, "architecture": type(bench.model).__name__},
        "workload": {**asdict(bench.windows.workload), "windows": count, "window": window},
        "environment": {
            **{"ace_moe": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
            **{"device": device.type, **card, "threads": torch.get_num_threads()},
        },
        "command": command,
    }


# ---- one dense pass for all ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chorus(Policy):
    """Skips nothing; fills the histogram of every token policy it is given. `seen` is by method."""

    voices: Mapping[str, TokenPolicy]
    seen: Mapping[str, Histogram]
    name = "chorus"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(sorted({table for voice in self.voices.values() for table in voice.needs}))

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        return any(voice.needs_logits for voice in self.voices.values())

    @property
    def needs_norms(self) -> bool:  # type: ignore[override]
        return any(voice.needs_norms for voice in self.voices.values())

    def route(self, routing: Routing) -> Decision:
        for method, voice in self.voices.items():
            self.seen[method].add(voice.protected(routing), routing.token_mask)
        return Decision(routing.ids, routing.gates, torch.ones_like(routing.ids, dtype=torch.bool))


def dense_pass(bench: Bench, voices: Mapping[str, TokenPolicy]) -> tuple[Score, dict[str, Histogram]]:
    """The unskipped model's score, and what every policy's slots contributed in that one pass."""
    seen = {method: Histogram() for method in voices}
    chorus, step = Chorus(voices=voices, seen=seen), Step()
    sites = MoEModel.of(bench.model).sites
    skippers = {s.path: Skipper(s.key, chorus, bench.plan.tables.get(s.key, {}), step) for s in sites}
    attachment = Attachment(bench.model, skippers, step, {s.path: s.router_path for s in sites})
    try:
        return score(bench.model, bench.windows, bench.batch, bench.tick), seen
    finally:
        attachment.remove()


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

    def __init__(self, ace: ACE, bench: Bench):
        super().__init__(ace, bench.model, bench.windows, bench.batch, bench.tick)
        self.outcomes: dict[float, Outcome] = {}

    def __call__(self, threshold: float) -> Histogram:
        """What the slots contributed. Where the ratio alone counts, a τ that was tried is not run again."""
        if by_quantile(self.ace.policy):
            return self._run(threshold)
        return Counted(self.outcome(threshold).realised)

    def outcome(self, threshold: float) -> Outcome:
        if threshold not in self.outcomes:
            self._run(threshold)
        return self.outcomes[threshold]

    def _run(self, threshold: float) -> Histogram:
        with ExitStack() as stack:
            counts = {s.key: _count_experts(s, stack) for s in self.ace.skippers}
            seen = super().__call__(threshold)
        layers = {key: layer["prefill"]["realised"] for key, layer in self.ace.report()["layers"].items()}
        experts = {key: _by_expert(counted) for key, counted in counts.items()}
        self.outcomes[threshold] = Outcome(self.scores[threshold], self.ace.realised, layers, experts)
        return seen


def by_quantile(policy: Policy) -> TypeGuard[TokenPolicy]:
    """Whether one dense pass maps this policy's budgets."""
    return isinstance(policy, TokenPolicy) and policy.mapping == "quantile"


def _count_experts(skipper: Skipper, stack: ExitStack) -> list[Tensor]:
    """Routed and executed slots by expert, one [2, E + 1]; grows while the stack is open, without a host sync."""
    counted: list[Tensor] = []

    def hook(module: Skipper, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ids, sentinel = args[1], args[3]
        if not counted:
            counted.append(torch.zeros(2, sentinel + 1, dtype=torch.int64, device=ids.device))
        both = torch.stack([ids, output[0]]).flatten(1).long()
        counted[0].scatter_add_(1, both, torch.ones_like(both))

    stack.callback(skipper.register_forward_hook(hook).remove)
    return counted


def _by_expert(counted: Sequence[Tensor]) -> list[float | None]:
    """Realised ratio of each expert's slots; None where no slot was routed. Re-routed slots can make it negative."""
    routed, executed = counted[0][:, :-1].tolist()
    return [round(1 - done / all_, 4) if all_ else None for all_, done in zip(routed, executed, strict=True)]


# ---- budgets ------------------------------------------------------------------------------------------------------


class Near(NamedTuple):
    """A threshold and the ratio it realised."""

    threshold: float
    realised: float


def fit(
    passes: Recorder, budget: float, dense: Histogram | None, near: Near | None = None, correct: bool = True
) -> Fit:
    """τ for one budget under the attached policy; `near` is what was found for it under another gain."""
    if near is not None and correct:
        realised = passes.outcome(near.threshold).realised
        # some policies only know steps: then the other gain's miss was the least there is
        if abs(realised - budget) <= max(NEAR, abs(near.realised - budget) + STEADY):
            return Fit(budget, near.threshold, realised, 1, corrected=True)
    return fit_budgets(passes, [budget], correct=correct, dense=dense)[0]
