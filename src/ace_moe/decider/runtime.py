"""A policy running in one engine: its layers, what they share, and what they counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, PolicyError
from ..plan import Plan
from ..policies import Policy, TokenPolicy
from .layer import Layer, Observer
from .report import COUNTED, NOT_COUNTED, Part, ratio
from .rows import row_of
from .state import NONE, State
from .tracking import Tracker


class Runtime:
    """Layers join with `add`; τ of a budget is changed with `set`, in place.

    `restore`: generated tokens get slots back whose expert another token of the step reads; `reads`: experts read are
    counted, with that or without.
    """

    def __init__(self, plan: Plan, policy: Policy, budgets: int = 1, *, restore: bool = False, reads: bool = False):
        if (restore or reads) and not isinstance(policy, TokenPolicy):
            raise PolicyError(f"restore needs a policy that decides token by token; {policy.key!r} does not.")
        self.plan, self.policy, self.state = plan, policy, State(budgets)
        self.votes = restore or reads
        self.layers: dict[str, Layer] = {}
        self.restore(restore)
        self.padding_known = True  # since the last reset
        self.tracker: Tracker | None = None

    def add(self, key: str, mark: int, device: torch.device | str, **options: Any) -> Layer:
        """The decider of a further layer. Options are those of `Layer`."""
        tables, factor = self.plan.tables.get(key, {}), self.policy.factor
        guarded = factor is not None and key in self.plan.guarded.get(factor, ())
        size = self.plan.fingerprint.structure.get(key, {})
        options |= {"experts": size.get("experts", 1), "width": size.get("top_k", 1), "votes": self.votes}
        layer = Layer(key, self.policy, tables, self.state, mark, device=device, guarded=guarded, **options)
        self.layers[key] = layer
        return layer

    # ---- τ ------------------------------------------------------------------------------------------------------

    def set(self, thresholds: Tensor, budget: int = 0, targets: Tensor | None = None) -> None:
        """τ of a budget's phases, [3]; in force at once, nothing is rebuilt. With targets [3] they move by themselves."""
        tau, target, rows = (
            self.state.tau,
            self.state.target,
            slice(row_of("prefill", budget), row_of("prefill", budget + 1)),
        )
        tau[rows] = thresholds
        target[rows] = NONE if targets is None else targets
        self.state.set(tau, target)
        if self.state.tracks and self.layers:  # what was counted until now is no step's
            self.track()
            self._counted_anew()

    def take_over(self, other: Runtime) -> None:
        """τ, targets and restoring as they are there."""
        self.state.set(other.state.tau, other.state.target)
        self.state.restore(other.state.restores)

    def freeze(self) -> None:
        """τ stays where it is from now on."""
        self.state.set(self.state.tau, torch.full_like(self.state.target, NONE))

    def restore(self, on: bool) -> None:
        """Slots come back from now on, or no longer."""
        if on and not self.votes:
            raise OptionError("Slots can be restored only if that was asked for at the start: `restore=True`.")
        self.state.restore(on)

    def after_step(self) -> None:
        """Behind the last layer of a step: thresholds that keep a budget are moved."""
        if self.tracker is None and self.state.tracks:
            self.track()
        if self.tracker is not None:
            self.tracker.step()

    def track(self) -> None:
        """Thresholds with a target move from now on."""
        self.tracker = self.tracker or Tracker(self.layers, self.state)

    # ---- what happened ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Tensor]:
        """Routed, kept and restored slots by layer, [R, 3] on the CPU. The only host sync, and it is the caller's."""
        return {key: layer.counts.cpu() for key, layer in self.layers.items()}

    def reads(self) -> dict[str, Tensor]:
        """Experts read and asked for by layer, [2, 2] on the CPU: in steps of generated tokens, and in those with prompts."""
        return {key: layer.reads.cpu() for key, layer in self.layers.items()} if self.votes else {}

    def restore_counts(self, counts: dict[str, Any]) -> None:
        """Counters go on where a stopped run left them."""
        for key, values in counts.items():
            if key in self.layers:
                self.layers[key].counts.copy_(torch.as_tensor(values))
        self._counted_anew()

    def _counted_anew(self) -> None:
        if self.tracker is not None:
            self.tracker.sync()

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not run since the last reset; 0 before any."""
        zero = torch.zeros(3, dtype=torch.int64)
        return ratio(sum((c.sum(0) for c in self.counts().values()), zero))

    def reset(self) -> None:
        self.padding_known = True
        for layer in self.layers.values():
            layer.counts.zero_()
            layer.reads.zero_()
        self._counted_anew()

    def part(self, **facts: Any) -> Part:
        """What this process has to say for a report."""
        chosen = {key: layer.chosen for key, layer in self.layers.items() if layer.chosen is not None}
        return Part(
            counts={key: c.tolist() for key, c in self.counts().items()},
            reads={key: r.tolist() for key, r in self.reads().items()},
            restores=self.state.restores,
            tau=self.state.tau.tolist(),
            executors={key: str(c) for key, c in chosen.items()},
            refused={key: c.refused for key, c in chosen.items()},
            padding=NOT_COUNTED if self.padding_known else COUNTED,
            **facts,
        )

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, passes run as ever and leave no trace: counters and thresholds are afterwards what they were."""
        tau, target, padding = self.state.tau, self.state.target, self.padding_known
        before = [(t, t.clone()) for layer in self.layers.values() for t in (layer.counts, layer.reads)]
        try:
            yield
        finally:
            for tensor, was in before:
                tensor.copy_(was)
            self.state.set(tau, target)
            self.padding_known = padding
            self._counted_anew()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is skipped, shown or counted: the unskipped model through the same dispatch."""
        observers = {key: layer.observers for key, layer in self.layers.items()}
        try:
            with self.uncounted():
                self.state.set(torch.zeros_like(self.state.tau), torch.full_like(self.state.target, NONE))
                for layer in self.layers.values():
                    layer.observers = []
                yield
        finally:
            for key, layer in self.layers.items():
                layer.observers = observers[key]

    @contextmanager
    def observed(self, make: Callable[[str], Observer]) -> Iterator[None]:
        """Inside, each layer's decisions are shown to the observer made for its key; they are taken in torch then."""
        ends = [layer.watch(make(key)) for key, layer in self.layers.items()]
        try:
            yield
        finally:
            for end in ends:
                end()
