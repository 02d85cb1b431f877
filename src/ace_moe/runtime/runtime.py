"""A policy running in one engine: its layers, what they share, and what they counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..plan import Plan
from ..policies import Policy
from .layer import Layer, Observer
from .report import COUNTED, NOT_COUNTED, Part, ratio
from .rows import PHASES, row_of
from .state import State


class Runtime:
    """Layers join with `add`; τ of a budget is changed with `set`, in place."""

    def __init__(self, plan: Plan, policy: Policy, budgets: int = 1):
        self.plan, self.policy, self.state = plan, policy, State(budgets)
        self.layers: dict[str, Layer] = {}
        self.padding_known = True  # since the last reset

    def add(self, key: str, mark: int, device: torch.device | str, **options: Any) -> Layer:
        """The decider of a further layer. Options are those of `Layer`."""
        tables, factor = self.plan.tables.get(key, {}), self.policy.factor
        guarded = factor is not None and key in self.plan.guarded.get(factor, ())
        layer = Layer(key, self.policy, tables, self.state, mark, device=device, guarded=guarded, **options)
        self.layers[key] = layer
        return layer

    # ---- τ ------------------------------------------------------------------------------------------------------

    def set(self, thresholds: Tensor, budget: int = 0) -> None:
        """τ of a budget's phases, [3]; in force at once, nothing is rebuilt."""
        tau = self.state.tau
        tau[row_of("prefill", budget) :][: len(PHASES)] = thresholds
        self.state.set(tau)

    # ---- what happened ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Tensor]:
        """Routed, kept and restored slots by layer, [R, 3] on the CPU. The only host sync, and it is the caller's."""
        return {key: layer.counts.cpu() for key, layer in self.layers.items()}

    def restore_counts(self, counts: dict[str, Any]) -> None:
        """Counters go on where a stopped run left them."""
        for key, values in counts.items():
            if key in self.layers:
                self.layers[key].counts.copy_(torch.as_tensor(values))

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not run since the last reset; 0 before any."""
        zero = torch.zeros(3, dtype=torch.int64)
        return ratio(sum((c.sum(0) for c in self.counts().values()), zero))

    def reset(self) -> None:
        self.padding_known = True
        for layer in self.layers.values():
            layer.counts.zero_()

    def part(self, **facts: Any) -> Part:
        """What this process has to say for a report."""
        chosen = {key: layer.chosen for key, layer in self.layers.items() if layer.chosen is not None}
        return Part(
            counts={key: c.tolist() for key, c in self.counts().items()},
            tau=self.state.tau.tolist(),
            executors={key: str(c) for key, c in chosen.items()},
            refused={key: c.refused for key, c in chosen.items()},
            padding=NOT_COUNTED if self.padding_known else COUNTED,
            **facts,
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is skipped, shown or counted: the unskipped model through the same dispatch."""
        tau, counts = self.state.tau, {key: layer.counts.clone() for key, layer in self.layers.items()}
        observers = {key: layer.observers for key, layer in self.layers.items()}
        try:
            self.state.set(torch.zeros_like(tau))
            for layer in self.layers.values():
                layer.observers = []
            yield
        finally:
            self.state.set(tau)
            for key, layer in self.layers.items():
                layer.observers = observers[key]
                layer.counts.copy_(counts[key])

    @contextmanager
    def observed(self, make: Callable[[str], Observer]) -> Iterator[None]:
        """Inside, each layer's decisions are shown to the observer made for its key; they are taken in torch then."""
        ends = [layer.watch(make(key)) for key, layer in self.layers.items()]
        try:
            yield
        finally:
            for end in ends:
                end()
