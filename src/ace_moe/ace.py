"""ACE: a plan in use. Attach it to a loaded transformers model, change the budget while it runs, see what it skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .checkpoint import MoEModel
from .errors import IntegrationError, OptionError
from .integrations.transformers import Attachment, attached_to, base_of
from .integrations.transformers.experts import CHOICES, Choice
from .plan import Plan
from .planning import map_budgets, text_for
from .policies import Policy, choose
from .runtime import Runtime, merge
from .runtime.settings import Skip, by_phase, check_budget, check_tables, check_threshold, thresholds
from .tables import TABLES
from .tables.build import add_tables, build_plan
from .text import Windows


@dataclass(frozen=True)
class Pending:
    """A budget that still waits for a model to be mapped on."""

    skip: Skip
    model: str | Path
    text: str | Path | None  # none: the model writes its own
    tokens: int

    def windows(self, model: PreTrainedModel) -> Windows:
        return text_for(model, self.model, self.text, tokens=self.tokens)


class ACE:
    """`skip` is the budget: one number, or {"prefill": 0.5, "decode": 0.3}. `realised` is what was not executed."""

    def __init__(
        self,
        plan: Plan,
        skip: Skip = 0.0,
        *,
        policy: str | Policy = "ace",
        preset: str | None = None,
        workload: str | None = None,
        allow_other_weights: bool = False,
        dispatch: Choice = "auto",
        pending: Pending | None = None,
        **settings: Any,
    ):
        if dispatch not in CHOICES:
            raise OptionError(f"dispatch is one of {', '.join(CHOICES)}, not {dispatch!r}.")
        self.plan, self.workload, self.allow_other_weights = plan, workload, allow_other_weights
        self.policy, self.dispatch = choose(policy, preset, **settings), dispatch
        check_tables(plan, self.policy, set(TABLES), calibrates=pending is not None)
        self._attachment: Attachment | None = None
        self._pending = pending
        self.runtime = Runtime(plan, self.policy)
        self.skip: Skip | None = None
        for budget in by_phase(pending.skip if pending else 0.0).values():
            check_budget(budget, plan.top_k, self.policy.min_active)
        self.set_skip(skip)

    @classmethod
    def load(cls, path: str | Path, skip: Skip = 0.0, **options: Any) -> ACE:
        """A plan file, checked. Options are those of the constructor."""
        return cls(Plan.load(path), skip, **options)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, skip: Skip = 0.0, *, text: str | Path | None = None, tokens: int = 65536, **options: Any
    ) -> ACE:
        """Tables from the checkpoint at once; what needs a text (thresholds, calibrations) when a model is attached.

        Without a `text` the model writes its own then.
        """
        return cls(build_plan(model), pending=Pending(skip, model, text, tokens), **options)

    @property
    def top_k(self) -> int:
        """Slots a token has in each layer (the fewest, where layers differ)."""
        return self.plan.top_k

    # ---- budget -------------------------------------------------------------------------------------------------

    @property
    def thresholds(self) -> Tensor:
        """τ for prefill, decode and verify, [3]."""
        return self.runtime.state.tau[1:4]

    def set_skip(self, skip: Skip) -> None:
        """Another budget, at once: τ is changed in place, nothing is rebuilt or recompiled."""
        self.runtime.set(thresholds(self.plan, self.policy, skip, self.workload))
        self.skip = dict(skip) if isinstance(skip, Mapping) else skip

    def set_threshold(self, threshold: float | Tensor) -> None:
        """τ itself, for all phases or as [prefill, decode] or [prefill, decode, verify]."""
        self.runtime.set(check_threshold(threshold))
        self.skip = None

    # ---- the model ----------------------------------------------------------------------------------------------

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[ACE]:
        self.attach(model)
        try:
            yield self
        finally:
            self.detach()

    def attach(self, model: PreTrainedModel) -> ACE:
        """Check that the plan belongs to this model, then skip in it until `detach`."""
        if self._attachment is not None and self._attachment.active:
            raise IntegrationError("This plan is attached to a model already. Call `ace.detach()` first.")
        inner = base_of(model)
        moe = MoEModel.of(inner)
        self.plan = self.plan.check_model(moe.fingerprint(), self.allow_other_weights)
        if self._pending is None:
            self.plan = add_tables(self.plan, self.policy.tables, inner)
        else:
            self._map(inner, self._pending)
        runtime = Runtime(self.plan, self.policy)
        self._attachment = Attachment(inner, runtime, moe.sites, self.dispatch)
        runtime.state.set(self.runtime.state.tau)
        self.runtime = runtime
        return self

    def _map(self, model: PreTrainedModel, pending: Pending) -> None:
        """The threshold that `from_pretrained` was asked for, and what the policy needs beside."""
        budgets = [b for b in set(by_phase(pending.skip).values()) if b != 0]
        if budgets or self.plan.lacks(self.policy.tables):
            self.plan = map_budgets(model, self.plan, self.policy, pending.windows(model), budgets).plan
        self.set_skip(pending.skip)
        self._pending = None

    def detach(self) -> None:
        """The model is as it was; the counters stay readable."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    @property
    def attachment(self) -> Attachment | None:
        return self._attachment

    # ---- what happened ------------------------------------------------------------------------------------------

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not executed since the last reset; 0 before any."""
        return self.runtime.realised

    def report(self) -> dict[str, Any]:
        """Realised ratios and counts: in all, by phase, by layer; how layers run, and why not otherwise."""
        return merge([self.runtime.part(skip=self.skip)])

    def reset(self) -> None:
        """Set all counters to zero."""
        self.runtime.reset()


def detach(model: PreTrainedModel) -> None:
    """Take whatever plan is attached out of a model, also where the ACE that attached it is gone; nothing if there is none."""
    found = attached_to(base_of(getattr(model, "_orig_mod", model)))
    if found is not None:
        found.remove()
