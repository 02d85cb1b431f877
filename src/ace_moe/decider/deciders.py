"""All deciders of one attachment: τ of every token class, what was counted, and how to look on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, PolicyError
from ..plan import Plan
from ..policies import Policy, TokenPolicy
from .controller import Controller
from .decider import Decider, Observer
from .report import COUNTED, NOT_COUNTED, Part, ratio
from .state import UNCONTROLLED, State


class Deciders(Mapping[str, Decider]):
    """The deciders by layer key, with the state they share. Layers join with `add`.

    `restore`: generated tokens get slots back whose expert another token of the step reads; `reads`: experts read are
    counted, with that or without.
    """

    def __init__(self, plan: Plan, policy: Policy, budgets: int = 1, *, restore: bool = False, reads: bool = False):
        if (restore or reads) and not isinstance(policy, TokenPolicy):
            raise PolicyError(f"restore needs a policy that decides token by token; {policy.key!r} does not.")
        self.plan, self.policy, self.state = plan, policy, State(budgets)
        self.votes = restore or reads
        self.state.restore(restore)
        self.padding_known = True  # since the last reset
        self.controller: Controller | None = None
        self._by_key: dict[str, Decider] = {}

    def __getitem__(self, key: str) -> Decider:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def begin(self, plan: Plan) -> None:
        """Start a new attachment, with this plan's tables; thresholds stay, counters start at zero."""
        self.plan, self.padding_known, self.controller, self._by_key = plan, True, None, {}

    def add(self, key: str, **options: Any) -> Decider:
        """The decider of a further layer. Options are those of `Decider`."""
        factor, facts = self.policy.factor, self.plan.fingerprint.structure.get(key, {})
        options = {"experts": facts.get("experts", 1), "top_k": facts.get("top_k", 1), "votes": self.votes, **options}
        guarded = factor is not None and key in self.plan.guarded.get(factor, ())
        tables = self.plan.tables.get(key, {})
        decider = Decider(key, self.policy, tables, self.state, guarded=guarded, **options)
        self._by_key[key] = decider
        return decider

    # ---- thresholds ---------------------------------------------------------------------------------------------

    def set(self, thresholds: Tensor, budget: int = 0, targets: Tensor | None = None) -> None:
        """Set τ of a budget's phases, [3], at once; with targets [3] the controller moves it from there."""
        self.state.set_budget(thresholds, budget, targets)
        if self.state.controlled and self._by_key:  # what was counted until now belongs to no step
            self.control()
            self._restart_controller()

    def restore(self, on: bool) -> None:
        """Restore slots from now on, or stop."""
        if on and not self.votes:
            raise OptionError("Slots can be restored only if that was asked for at the start: `restore=True`.")
        self.state.restore(on)

    def freeze(self) -> None:
        """Keep τ where it is from now on."""
        self.state.set(self.state.tau, torch.full_like(self.state.target, UNCONTROLLED))

    def control(self) -> None:
        """Have thresholds with a target move from now on."""
        self.controller = self.controller or Controller(self, self.state)

    def after_step(self) -> None:
        """Move thresholds behind the last layer of a step, if any has a target."""
        if self.controller is None and self.state.controlled:
            self.control()
        if self.controller is not None:
            self.controller.step()

    def _restart_controller(self) -> None:
        if self.controller is not None:
            self.controller.sync()

    # ---- what happened ------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Tensor]:
        """Routed, kept and restored slots by layer, [R, 3] on the CPU. The only host sync, and it is the caller's."""
        return {key: decider.counts.cpu() for key, decider in self.items()}

    def reads(self) -> dict[str, Tensor]:
        """Experts read and asked for by layer, [2, 2] on the CPU: in steps of generated tokens, and in those with prompts."""
        return {key: decider.reads.cpu() for key, decider in self.items()} if self.votes else {}

    def continue_counts(self, counts: Mapping[str, Any]) -> None:
        """Count on from where a stopped run was."""
        for key, values in counts.items():
            if key in self:
                self[key].counts.copy_(torch.as_tensor(values))
        self._restart_controller()

    @property
    def realised(self) -> float:
        """Fraction of routed slots that did not run since the last reset; 0 before any."""
        total = sum((counts.sum(0) for counts in self.counts().values()), torch.zeros(3, dtype=torch.int64))
        return ratio(total)

    def reset(self) -> None:
        self.padding_known = True
        for decider in self._by_key.values():
            decider.counts.zero_()
            decider.reads.zero_()
        self._restart_controller()

    def part(self, **facts: Any) -> Part:
        """This process's part of a report."""
        chosen = {key: decider.chosen for key, decider in self.items() if decider.chosen is not None}
        return Part(
            counts={key: counts.tolist() for key, counts in self.counts().items()},
            reads={key: reads.tolist() for key, reads in self.reads().items()},
            restores=self.state.restores,
            tau=self.state.tau.tolist(),
            executors={key: str(executor) for key, executor in chosen.items()},
            refused={key: executor.refused for key, executor in chosen.items()},
            padding=NOT_COUNTED if self.padding_known else COUNTED,
            **facts,
        )

    # ---- for a while --------------------------------------------------------------------------------------------

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run as ever and leave no trace: counters and thresholds are afterwards what they were."""
        tau, target, padding = self.state.tau, self.state.target, self.padding_known
        before = [(t, t.clone()) for decider in self.values() for t in (decider.counts, decider.reads)]
        try:
            yield
        finally:
            for tensor, was in before:
                tensor.copy_(was)
            self.state.set(tau, target)
            self.padding_known = padding
            self._restart_controller()

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Run the unskipped model; counters and observers are off."""
        observers = {key: decider.observers for key, decider in self.items()}
        try:
            with self.uncounted():
                self.state.set(torch.zeros_like(self.state.tau), torch.full_like(self.state.target, UNCONTROLLED))
                for decider in self.values():
                    decider.observers = []
                yield
        finally:
            for key, decider in self.items():
                decider.observers = observers[key]

    @contextmanager
    def observed(self, make: Callable[[str], Observer]) -> Iterator[None]:
        """Show each layer's decisions to the observer that `make` gives for its key; they are taken in torch then."""
        ends = [decider.observe(make(key)) for key, decider in self.items()]
        try:
            yield
        finally:
            for end in ends:
                end()
