"""ACE: a plan in use. Attach it to a loaded transformers model, change the budget while it runs, see what it skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .budget import NONE, Budget, BudgetLike
from .checkpoint import MoEModel, Site
from .decider import Deciders, merge
from .decider.rows import BUDGETS
from .decider.thresholds import Control, check_control, check_threshold, thresholds_for
from .engines.transformers import Attachment, attachments_in, base_of
from .engines.transformers.attachment import CHANGING
from .engines.transformers.experts import CHOICES, Choice
from .errors import BudgetError, IntegrationError, OptionError, PlanError, PolicyError
from .mapping import TextSource, ensure
from .plan import Lookup, Plan
from .plan.hub import load_plan
from .policies import AUTO, Policy, policy_for
from .progress import reporting
from .tables.build import add_tables, build_plan, check_tables
from .text import Text


class ACE:
    """`skip` is the budget: one number, or {"prefill": 0.5, "decode": 0.3}. `realised` is what was not executed.

    `restore`: a generated token gets back the slots whose expert another token of its step reads anyway; what it runs then
    depends on its batch, and is never less than it would run alone. `reads`: count experts read, with that or without.
    `control="track"`: thresholds move by themselves so that the budget is kept on whatever is run.
    `policy="auto"`: what `ace tune` recommends in the plan, else what its newest thresholds are of, else the gate share.
    `text`: where thresholds that the plan lacks are mapped, when a model is attached; without it they are an error.
    """

    def __init__(
        self,
        plan: Plan,
        skip: BudgetLike = 0.0,
        *,
        policy: str | Policy = AUTO,
        preset: str | None = None,
        workload: str | None = None,
        allow_other_weights: bool = False,
        dispatch: Choice = "auto",
        restore: bool = False,
        reads: bool = False,
        control: Control = "fixed",
        text: TextSource | None = None,
        **settings: Any,
    ):
        if dispatch not in CHOICES:
            raise OptionError(f"dispatch is one of {', '.join(CHOICES)}, not {dispatch!r}.")
        if not isinstance(plan, Plan):
            raise PlanError(
                f"ACE takes a plan that is loaded, not {type(plan).__name__}: `ACE.load` reads one from a file or the hub, "
                "`ACE.from_pretrained` makes one of a model."
            )
        self.policy = policy_for(plan, policy, preset, workload, **settings)
        check_tables(plan, self.policy)
        self.workload, self.allow_other_weights, self.dispatch = workload, allow_other_weights, dispatch
        self.top_k = plan.top_k  # slots a token has in each layer (the fewest, where layers differ)
        self._use(plan)
        self.control = check_control(control, self.policy)
        self.text = text
        self.deciders = Deciders(plan, self.policy, BUDGETS, restore=restore, reads=reads)
        self.attachment: Attachment | None = None
        self._made_of: tuple[Callable[[], object], list[Site]] = (
            _nothing,
            [],
        )  # the model a plan was made of, if it is here
        self._watch: Callable[[], AbstractContextManager[None]] = nullcontext
        self._sequence_budgets: list[Budget] = []
        self.budget: Budget | None = NONE  # None where a threshold was set
        self._waits = False  # whether the budget has to be mapped when a model is attached
        self.set_skip(skip)

    def _use(self, plan: Plan) -> None:
        self.plan, self.lookup = plan, Lookup(plan, self.policy.settings, self.workload)

    @classmethod
    def load(cls, path: str | Path, skip: BudgetLike = 0.0, **options: Any) -> ACE:
        """A plan file, or a plan of the hub as owner/name; both are checked. Options are those of the constructor."""
        return cls(load_plan(path), skip, **options)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        skip: BudgetLike = 0.0,
        *,
        text: str | Path | Sequence[str] | None = None,
        tokenizer: Any = None,
        tokens: int = 65536,
        window: int = 1024,
        progress: Callable[[str, int, int | None], object] | None = None,
        **options: Any,
    ) -> ACE:
        """For a checkpoint or a loaded model without a plan: what is missing is made when a model is attached.

        Without a `text` (a file, a string or a list of strings) the model writes its own then. `progress` is told of long
        work: what it is, how much is done, and of how much if that is known.
        """
        model = base_of(model) if isinstance(model, nn.Module) else model
        content = None if text is None else Text.of(text)
        name = model.config._name_or_path if isinstance(model, PreTrainedModel) else model
        source = TextSource(name, content, window, tokens, tokenizer)
        moe = MoEModel.of(model) if isinstance(model, PreTrainedModel) else MoEModel.open(model)
        ace = cls(build_plan(moe), skip, text=source, **options)
        ace._watch = reporting(progress)
        if isinstance(model, PreTrainedModel):
            ace._made_of = ref(model), moe.sites
        return ace

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, is attached to nothing and has counted nothing; its budget is as it stands here."""
        deciders = Deciders(self.plan, self.policy, BUDGETS, reads=self.deciders.votes)
        deciders.state.set(self.deciders.state.tau, self.deciders.state.target)
        deciders.state.restore(self.deciders.state.restores)
        return {
            **vars(self),
            "deciders": deciders,
            "attachment": None,
            "_watch": nullcontext,
            "_made_of": (_nothing, []),
        }

    def __repr__(self) -> str:
        budget = f"threshold {self.thresholds[1]:.4g}" if self.budget is None else f"skip={self.skip}"
        state = f"attached, {self.realised:.1%} skipped" if self.attachment is not None else "not attached"
        return f"ACE({self.plan.model or 'model'}: policy={self.policy.key!r}, {budget}, gain={self.policy.gain!r}, {state})"

    # ---- budget -------------------------------------------------------------------------------------------------

    @property
    def skip(self) -> float | dict[str, float] | None:
        """The budget as reports show it; None where a threshold was set."""
        return None if self.budget is None else self.budget.to_json()

    @property
    def thresholds(self) -> Tensor:
        """τ for prefill, decode and verify, [3]."""
        return self.deciders.state.tau[1:4]

    def set_skip(self, skip: BudgetLike) -> None:
        """Another budget, at once: τ is changed in place, nothing is rebuilt or recompiled. Counters start anew.

        A budget that has to be mapped first waits for a model to be attached.
        """
        budget = Budget.parse(skip).check(self.top_k, self.policy.min_active)
        try:
            tau, targets = thresholds_for(self.lookup, budget, self.control)
        except BudgetError:
            self._waits = self.text is not None and self.attachment is None
            if not self._waits:
                raise
        else:
            self._waits = False
            self.deciders.set(tau, targets=targets)
            self.deciders.reset()
        self.budget = budget

    def set_threshold(self, threshold: float | Tensor) -> None:
        """τ itself, for all phases or as [prefill, decode] or [prefill, decode, verify]."""
        self.deciders.set(check_threshold(threshold))
        self.deciders.reset()
        self.budget, self._waits = None, False

    @contextmanager
    def budgets(self, wishes: Sequence[BudgetLike]) -> Iterator[None]:
        """Inside, each sequence of a batch has the budget at its place; `report()["requests"]` tells them apart."""
        if not self.policy.by_token:
            raise PolicyError(
                f"Policy {self.policy.key!r} decides by the batch or the sequence: all sequences of a batch have one budget."
            )
        if self.attachment is None:
            raise IntegrationError("Budgets for single sequences need an attached model: `ace.attach(model)` first.")
        listed = list(wishes) if isinstance(wishes, Iterable) and not isinstance(wishes, (str, Mapping)) else []
        if not listed:
            raise BudgetError(f"Give a budget for each sequence of the batch, such as [0.3, 0.0]; not {wishes!r}.")
        numbers = torch.tensor([self._number(wish) for wish in listed])
        with self.attachment.with_context(budgets=numbers):
            yield

    def _number(self, wish: BudgetLike) -> int:
        """The number of a sequence's budget; a new one gets token classes of its own."""
        budget = Budget.parse(wish).check(self.top_k, self.policy.min_active).rounded()
        if budget.verify != budget.decode:
            raise BudgetError("A sequence's own budget names prefill and decode; its drafted tokens go by decode.")
        if budget not in self._sequence_budgets:
            if len(self._sequence_budgets) + 1 == BUDGETS:
                raise BudgetError(
                    f"There is room for {BUDGETS - 1} different budgets of sequences; reset() makes room."
                )
            tau, targets = thresholds_for(self.lookup, budget, self.control)
            self._sequence_budgets.append(budget)
            self.deciders.set(tau, len(self._sequence_budgets), targets)
        return self._sequence_budgets.index(budget) + 1

    def freeze(self) -> Tensor:
        """Keep thresholds that moved by themselves where they are from now on; returns them, [3]."""
        self.deciders.freeze()
        self.control = "fixed"
        return self.thresholds

    def set_restore(self, on: bool) -> None:
        """Restore slots from now on, or stop; needs `restore=True` or `reads=True` from the start."""
        self.deciders.restore(on)

    # ---- the model ----------------------------------------------------------------------------------------------

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[ACE]:
        self.attach(model)
        try:
            yield self
        finally:
            self.detach()

    def attach(self, model: PreTrainedModel) -> ACE:
        """Check that the plan belongs to this model, make what it lacks, then skip in it until `detach`."""
        if self.attachment is not None and self.attachment.active:
            raise IntegrationError("This plan is attached to a model already. Call `ace.detach()` first.")
        inner = base_of(model)
        with CHANGING, self._watch():  # no other thread puts parts in or takes them out while the model is looked at
            model_of, sites = self._made_of
            if model_of() is not inner:  # else the plan was made of this very model
                moe = MoEModel.of(inner)
                self._use(self.plan.check_model(moe.fingerprint(), self.allow_other_weights))
                sites = moe.sites
            self._use(add_tables(self.plan, self.policy.tables, inner))
        self.deciders.begin(self.plan)
        self.attachment = Attachment(inner, self.deciders, sites, self.dispatch)
        if self._waits:
            try:
                self._map(inner)
            except BaseException:
                self.detach()
                raise
        return self

    def _map(self, model: PreTrainedModel) -> None:
        """Map the budget that waited for a model."""
        assert self.text is not None and self.budget is not None
        with self._watch():
            budgets = self.budget.values
            self._use(ensure(model, self.plan, self.policy, budgets, self.text, deciders=self.deciders))
        self.set_skip(self.budget)

    def detach(self) -> None:
        """Leave the model as it was; the counters stay readable."""
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None

    # ---- what happened ------------------------------------------------------------------------------------------

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not executed since the last reset; 0 before any."""
        return self.deciders.realised

    def report(self) -> dict[str, Any]:
        """Realised ratios and counts: in all, by phase, by layer; how layers run, and why not otherwise."""
        return merge([self.deciders.part(skip=self.skip, budgets=[str(b) for b in self._sequence_budgets])])

    def reset(self) -> None:
        """Set all counters to zero, and forget the budgets of sequences."""
        self._sequence_budgets = []
        self.deciders.reset()


def _nothing() -> None:
    """Stand in for a weak reference where a plan was not made of a model in memory."""


def detach(model: PreTrainedModel) -> None:
    """Take whatever plan is attached out of a model, also where the ACE that attached it is gone; nothing if there is none.

    The model may be compiled or wrapped by now, and the plan attached to a part of it or to what it is a part of.
    """
    for attachment in attachments_in(model):
        attachment.remove()
