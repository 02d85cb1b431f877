"""ACE: a plan in use. Attach it to a loaded transformers model, change the budget while it runs, see what it skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .budget import check_budget
from .checkpoint import MoEModel
from .dispatch import Choice, fast_path
from .errors import BudgetError, IntegrationError, PlanError, PolicyError
from .integrations.transformers import Attachment
from .plan import Phase, Plan, missing_table
from .policies import PRESETS, Policy, make
from .skipper import DECODE, PREFILL, Skipper, Step
from .tables import TABLES
from .text import Windows

PHASES: dict[Phase, tuple[int, ...]] = {"both": (PREFILL, DECODE), "prefill": (PREFILL,), "decode": (DECODE,)}
Skip = float | Mapping[str, float]


@dataclass(frozen=True)
class Pending:
    """A budget that still waits for a model to be mapped on."""

    skip: Skip
    model: str | Path
    text: str | Path
    tokens: int

    def windows(self, model: PreTrainedModel) -> Windows:
        from .loading import load_tokenizer, load_windows

        return load_windows(model, load_tokenizer(self.model), self.text, 1024, self.tokens)


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
        self.plan, self.workload, self.allow_other_weights = plan, workload, allow_other_weights
        self.dispatch = dispatch
        self.policy = choose(policy, preset, **settings)
        check_tables(plan, self.policy, calibrates=pending is not None)
        self._attachment: Attachment | None = None
        self._pending = pending
        self._skippers: list[Skipper] = []
        self._thresholds = self._look_up(skip)

    @classmethod
    def load(cls, path: str | Path, skip: Skip = 0.0, **options: Any) -> ACE:
        """A plan file, checked. Options are those of the constructor."""
        return cls(Plan.load(path), skip, **options)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, skip: Skip = 0.0, *, text: str | Path | None = None, tokens: int = 65536, **options: Any
    ) -> ACE:
        """Tables from the checkpoint at once; with `text`, what needs one (thresholds, calibrations) when a model is attached."""
        from .offline import build_plan

        pending = Pending(skip, model, text, tokens) if text else None
        return cls(build_plan(model), 0.0 if text else skip, pending=pending, **options)

    @property
    def top_k(self) -> int:
        """Slots a token has in each layer (the fewest, where layers differ)."""
        return self.plan.top_k

    # ---- budget -------------------------------------------------------------------------------------------------

    def _look_up(self, skip: Skip) -> Tensor:
        """τ for prefill and decode, [2]."""
        budgets = dict(skip) if isinstance(skip, Mapping) else {"both": skip}
        thresholds = torch.zeros(2, dtype=torch.float32)
        for phase, budget in budgets.items():
            if phase not in PHASES:
                raise BudgetError(f"Budgets can differ for prefill and decode, not for {phase!r}.")
            value = check_budget(budget, self.top_k, self.policy.min_active)
            tau, notice = self.plan.threshold(self.policy.settings, value, phase, self.workload)
            if notice:
                warnings.warn(notice, stacklevel=3)
            thresholds[list(PHASES[phase])] = tau
        return thresholds

    @property
    def thresholds(self) -> Tensor:
        """τ for prefill and decode, [2]."""
        return self._thresholds.clone()

    def set_skip(self, skip: Skip) -> None:
        """Another budget, at once: τ is changed in place, nothing is rebuilt or recompiled."""
        self.set_threshold(self._look_up(skip))

    def set_threshold(self, threshold: float | Tensor) -> None:
        """τ itself, for both phases or as [prefill, decode]."""
        self._thresholds = torch.as_tensor(threshold, dtype=torch.float32).expand(2).clone()
        for skipper in self._skippers:
            skipper.threshold.copy_(self._thresholds)

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
        if self._attachment is not None:
            raise IntegrationError("This plan is attached to a model already. Call `ace.detach()` first.")
        moe = MoEModel.of(model)
        self.plan = self._complete(self.plan.check_model(moe.fingerprint(), self.allow_other_weights), model)
        step = Step()
        by_path = {s.path: Skipper(s.key, self.policy, self.plan.tables.get(s.key, {}), step) for s in moe.sites}
        for path, skipper in by_path.items():
            fast = fast_path(model.get_submodule(path), self.policy, self.dispatch)
            skipper.fast = None if isinstance(fast, str) else fast
        routers, top_k = ({s.path: getattr(s, n) for s in moe.sites} for n in ("router_path", "top_k"))
        self._attachment = Attachment(model, by_path, step, routers, top_k)
        self._skippers = list(by_path.values())
        self.set_threshold(self._thresholds)
        if self._pending is not None:
            self._map(model, self._pending)
        return self

    def _complete(self, plan: Plan, model: PreTrainedModel) -> Plan:
        """The plan with what the policy needs beside: tables from the weights, and from a text if one was given."""
        if not plan.lacks(self.policy.needs):
            return plan
        from .offline import add_tables, calibration_part, prepare

        if self._pending is None:
            return add_tables(plan, self.policy, model)
        return prepare(plan, self.policy, model, calibration_part(self._pending.windows(model)))

    def _map(self, model: PreTrainedModel, pending: Pending) -> None:
        """The threshold that `from_pretrained` was asked for; on an error the model is detached again."""
        from .offline import Passes, fit_budgets, thresholds

        budgets = set(pending.skip.values()) if isinstance(pending.skip, Mapping) else {pending.skip}
        wanted = [check_budget(b, self.top_k, self.policy.min_active) for b in budgets]
        try:
            windows = pending.windows(model)
            fits = fit_budgets(Passes(self, model, windows), [b for b in wanted if b > 0])
            self.plan = self.plan.with_thresholds(thresholds(fits, self.policy, windows))
            self.set_skip(pending.skip)
        except BaseException:
            self.detach()
            raise
        self._pending = None
        self.reset()

    def detach(self) -> None:
        """The model is as it was; the counters stay readable."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    # ---- what happened ------------------------------------------------------------------------------------------

    @property
    def skippers(self) -> list[Skipper]:
        return self._skippers

    @property
    def realised(self) -> float:
        """Fraction of routed slots that was not executed since the last reset; 0 before any."""
        counts = sum((s.counts.sum(0).cpu() for s in self._skippers), torch.zeros(2, dtype=torch.int64))
        return _ratio(counts)

    def report(self) -> dict[str, Any]:
        """Realised ratios and counts: in all, by phase, by layer."""
        by_layer = {s.key: s.counts.cpu() for s in self._skippers}
        total = sum(by_layer.values(), torch.zeros(2, 2, dtype=torch.int64))
        step = self._skippers[0].step if self._skippers else Step()
        return {
            "realised": _ratio(total.sum(0)),
            "prefill": _entry(total[PREFILL]),
            "decode": _entry(total[DECODE]),
            "layers": {k: {"prefill": _entry(c[PREFILL]), "decode": _entry(c[DECODE])} for k, c in by_layer.items()},
            "padding": "not counted" if step.masked else "counted: some passes came without a 2-D attention mask",
        }

    def reset(self) -> None:
        """Set all counters to zero."""
        for skipper in self._skippers:
            skipper.counts.zero_()


def choose(policy: str | Policy = "ace", preset: str | None = None, **settings: Any) -> Policy:
    """The policy of a name or a preset, with the settings that are given."""
    if preset is None:
        return make(policy, **settings)
    if preset not in PRESETS:
        raise PolicyError(f"There is no preset {preset!r}. Choose one of: {', '.join(PRESETS)}.")
    if policy not in ("ace", PRESETS[preset].name):
        raise PolicyError(f"Preset {preset!r} is a policy by itself; give it or policy={policy!r}, not both.")
    return make(PRESETS[preset], **settings)


def check_tables(plan: Plan, policy: Policy, calibrates: bool = False) -> None:
    """Whether the policy can have its tables: those from weights are made when a model is attached, others need a text."""
    for name in plan.lacks(policy.needs):
        if name in plan.undefined:
            raise PlanError(
                f"Policy {policy.name!r} needs the table {name}, which this model has none of: {plan.undefined[name]} "
                "Policy 'share' needs no table."
            )
        if name not in TABLES and not calibrates:
            raise PlanError(missing_table(policy.name, name, policy.calibrated))


def _ratio(counts: Tensor) -> float:
    routed, kept = counts.tolist()
    return 1 - kept / routed if routed else 0.0


def _entry(counts: Tensor) -> dict[str, Any]:
    routed, kept = counts.tolist()
    return {"routed": routed, "kept": kept, "realised": _ratio(counts)}
