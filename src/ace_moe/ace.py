"""ACE: a plan in use. Attach it to a loaded transformers model, change the budget while it runs, see what it skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .budget import check_budget
from .checkpoint import MoEModel
from .decider import Runtime, merge
from .decider.rows import BUDGETS, Budget
from .decider.settings import Skip, alignment, by_phase, check_tables, check_threshold, plain, policy_for
from .decider.tracking import Control, check_control, look_up
from .engines.transformers import Attachment, base_of
from .engines.transformers.attachment import CHANGING
from .engines.transformers.experts import CHOICES, Choice
from .engines.transformers.models import attachments_in
from .errors import BudgetError, IntegrationError, OptionError, PlanError, PolicyError
from .mapping import map_budgets, text_for
from .plan import Plan
from .plan.hub import load_plan
from .policies import AUTO, Policy
from .progress import told
from .tables import TABLES
from .tables.build import add_tables, build_plan
from .text import Text, Windows


@dataclass(frozen=True)
class Pending:
    """A budget that still waits for a model to be mapped on; none where a threshold was set meanwhile."""

    skip: Skip | None
    model: str | Path  # where its tokenizer comes from, unless one was given
    text: Text | None  # none: the model writes its own
    tokens: int
    tokenizer: Any = None

    def windows(self, model: PreTrainedModel) -> Windows:
        return text_for(model, self.model, self.text, tokens=self.tokens, tokenizer=self.tokenizer)


class ACE:
    """`skip` is the budget: one number, or {"prefill": 0.5, "decode": 0.3}. `realised` is what was not executed.

    `restore`: a generated token gets back the slots whose expert another token of its step reads anyway; what it runs then
    depends on its batch, and is never less than it would run alone. `reads`: count experts read, with that or without.
    `control="track"`: thresholds move by themselves so that the budget is kept on whatever is run.
    `policy="auto"`: what `ace tune` recommends in the plan, else what its newest thresholds are of, else the gate share.
    """

    def __init__(
        self,
        plan: Plan,
        skip: Skip = 0.0,
        *,
        policy: str | Policy = AUTO,
        preset: str | None = None,
        workload: str | None = None,
        allow_other_weights: bool = False,
        dispatch: Choice = "auto",
        restore: bool = False,
        reads: bool = False,
        control: Control = "fixed",
        pending: Pending | None = None,
        **settings: Any,
    ):
        if dispatch not in CHOICES:
            raise OptionError(f"dispatch is one of {', '.join(CHOICES)}, not {dispatch!r}.")
        if not isinstance(plan, Plan):
            raise PlanError(
                f"ACE takes a plan that is loaded, not {type(plan).__name__}: `ACE.load` reads one from a file or the hub, "
                "`ACE.from_pretrained` makes one of a model."
            )
        self.plan, self.workload, self.allow_other_weights = plan, workload, allow_other_weights
        self.policy, self.dispatch = policy_for(plan, policy, preset, workload, **settings), dispatch
        check_tables(plan, self.policy, set(TABLES), calibrates=pending is not None)
        self.attachment: Attachment | None = None
        self._votes = {"restore": restore, "reads": reads}
        self.control = check_control(control, self.policy)
        self.runtime = Runtime(plan, self.policy, BUDGETS, **self._votes)
        self._budgets: list[Budget] = []  # of sequences
        self._watch: Callable[[], AbstractContextManager[None]] = nullcontext
        self.skip: Skip | None = None
        self._pending: Pending | None = None
        self.set_skip(skip)
        self._pending = pending
        if pending is not None and pending.skip is not None:
            self.set_skip(pending.skip)

    @classmethod
    def load(cls, path: str | Path, skip: Skip = 0.0, **options: Any) -> ACE:
        """A plan file, or a plan of the hub as owner/name; both are checked. Options are those of the constructor."""
        return cls(load_plan(path), skip, **options)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        skip: Skip = 0.0,
        *,
        text: str | Path | Sequence[str] | None = None,
        tokenizer: Any = None,
        tokens: int = 65536,
        progress: Callable[[str, int, int | None], object] | None = None,
        **options: Any,
    ) -> ACE:
        """Tables at once, from a checkpoint or a loaded model; what needs a text (thresholds, calibrations) when a model is
        attached. Without a `text` (a file, a string or a list of strings) the model writes its own then.

        `progress` is told of long work: what it is, how much is done, and of how much if that is known.
        """
        model = base_of(model) if isinstance(model, nn.Module) else model
        read = None if text is None else Text.of(text)
        source = model.config._name_or_path if isinstance(model, PreTrainedModel) else model
        pending, watch = Pending(skip, source, read, tokens, tokenizer), told(progress)
        with watch():
            made = cls(build_plan(model), pending=pending, **options)
        made._watch = watch
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, is attached to nothing and has counted nothing; its budget is as it stands here."""
        fresh = Runtime(self.plan, self.policy, BUDGETS, **self._votes)
        fresh.take_over(self.runtime)
        return {**vars(self), "runtime": fresh, "attachment": None, "_watch": nullcontext}

    def __repr__(self) -> str:
        asked = self._pending.skip if self._pending else self.skip
        budget = f"threshold {self.thresholds[1]:.4g}" if asked is None else f"skip={asked}"
        state = f"attached, {self.realised:.1%} skipped" if self.attachment is not None else "not attached"
        return f"ACE({self.plan.model or 'model'}: policy={self.policy.key!r}, {budget}, gain={self.policy.gain!r}, {state})"

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
        """Another budget, at once: τ is changed in place, nothing is rebuilt or recompiled. Counters start anew.

        What `from_pretrained` made has no thresholds before a model is attached: the budget waits for that.
        """
        if self._pending is not None:
            for budget in by_phase(skip).values():
                check_budget(budget, self.top_k, self.policy.min_active)
            self._pending = replace(self._pending, skip=plain(skip))
            return
        self._set(skip)
        self.runtime.reset()
        self.skip = plain(skip)

    def _set(self, skip: Skip, number: int = 0) -> None:
        tau, targets = look_up(self.plan, self.policy, skip, self.workload, self.control)
        statistics = alignment(self.plan, self.policy, skip, self.workload)
        self.runtime.set(tau, number, targets)
        self.runtime.align(statistics)

    @contextmanager
    def rows(self, budgets: Sequence[Skip]) -> Iterator[None]:
        """Inside, each sequence of a batch has the budget at its place; `report()["requests"]` tells them apart."""
        if self.policy.aligned:
            raise BudgetError("Under `aligned` sequences have one budget: its statistics are of one τ.")
        if not self.policy.token_local:
            raise PolicyError(
                f"Policy {self.policy.key!r} decides by the batch or the sequence: all sequences of a batch have one budget."
            )
        if self.attachment is None:
            raise IntegrationError("Budgets for single sequences need an attached model: `ace.attach(model)` first.")
        listed = list(budgets) if isinstance(budgets, Iterable) and not isinstance(budgets, (str, Mapping)) else []
        if not listed:
            raise BudgetError(f"Give a budget for each sequence of the batch, such as [0.3, 0.0]; not {budgets!r}.")
        numbers = torch.tensor([self._number(budget) for budget in listed])
        with self.attachment.told(budgets=numbers):
            yield

    def _number(self, skip: Skip) -> int:
        """The number of a sequence's budget; a new one gets rows of its own."""
        phases = by_phase(skip)
        if phases["verify"] != phases["decode"]:
            raise BudgetError("A sequence's own budget names prefill and decode; its drafted tokens go by decode.")
        budget = Budget(
            *(round(check_budget(phases[p], self.top_k, self.policy.min_active), 2) for p in ("prefill", "decode"))
        )
        if budget not in self._budgets:
            if len(self._budgets) + 1 == BUDGETS:
                raise BudgetError(
                    f"There is room for {BUDGETS - 1} different budgets of sequences; reset() makes room."
                )
            self._set(budget.skip, len(self._budgets) + 1)
            self._budgets.append(budget)
        return self._budgets.index(budget) + 1

    def freeze(self) -> Tensor:
        """Thresholds that moved by themselves stay where they are from now on; returns them, [3]."""
        self.runtime.freeze()
        self.control = "fixed"
        return self.thresholds

    def set_restore(self, on: bool) -> None:
        """Restore slots from now on, or no longer; needs `restore=True` or `reads=True` from the start."""
        self.runtime.restore(on)

    def set_threshold(self, threshold: float | Tensor) -> None:
        """τ itself, for all phases or as [prefill, decode] or [prefill, decode, verify]."""
        tau = check_threshold(threshold)
        if self.policy.aligned and tau.any():
            raise BudgetError("Under `aligned` a τ needs statistics of its own: set a mapped budget with `set_skip`.")
        self.runtime.set(tau)
        self.runtime.reset()
        self.skip = None
        if self._pending is not None:
            self._pending = replace(self._pending, skip=None)

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
        if self.attachment is not None and self.attachment.active:
            raise IntegrationError("This plan is attached to a model already. Call `ace.detach()` first.")
        inner = base_of(model)
        with CHANGING:  # no other thread puts parts in or takes them out while the model is looked at
            moe = MoEModel.of(inner)
            self.plan = self.plan.check_model(moe.fingerprint(), self.allow_other_weights)
            if self._pending is None:
                self.plan = add_tables(self.plan, self.policy.tables, inner)
        if self._pending is not None:
            self._map(inner, self._pending)
        runtime = Runtime(self.plan, self.policy, BUDGETS, **self._votes)
        self.attachment = Attachment(inner, runtime, moe.sites, self.dispatch)
        runtime.take_over(self.runtime)
        self.runtime = runtime
        return self

    def _map(self, model: PreTrainedModel, pending: Pending) -> None:
        """The threshold that `from_pretrained` was asked for, and what the policy needs beside."""
        budgets = [b for b in set(by_phase(pending.skip or 0.0).values()) if b != 0]
        if budgets or self.plan.lacks(self.policy.tables):
            with self._watch():
                self.plan = map_budgets(model, self.plan, self.policy, pending.windows(model), budgets).plan
        self._pending = None
        if pending.skip is not None:
            self.set_skip(pending.skip)

    def detach(self) -> None:
        """The model is as it was; the counters stay readable."""
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None

    # ---- what happened ------------------------------------------------------------------------------------------

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not executed since the last reset; 0 before any."""
        return self.runtime.realised

    def report(self) -> dict[str, Any]:
        """Realised ratios and counts: in all, by phase, by layer; how layers run, and why not otherwise."""
        return merge([self.runtime.part(skip=self.skip, budgets=[str(b) for b in self._budgets])])

    def reset(self) -> None:
        """Set all counters to zero, and forget the budgets of sequences."""
        self._budgets = []
        self.runtime.reset()


def detach(model: PreTrainedModel) -> None:
    """Take whatever plan is attached out of a model, also where the ACE that attached it is gone; nothing if there is none.

    The model may be compiled or wrapped by now, and the plan attached to a part of it or to what it is a part of.
    """
    for found in attachments_in(model):
        found.remove()
