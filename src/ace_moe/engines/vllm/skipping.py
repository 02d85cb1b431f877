"""The skipping of one engine in one process: its deciders, the classes of its tokens, and how vLLM's layers join it."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...budget import Budget
from ...decider import Decider, Deciders, Part, Thresholds
from ...decider.rows import BUDGETS
from ...decider.thresholds import check_threshold
from ...errors import IntegrationError, OptionError, PlanError
from ...kernels import usable
from ...plan import structure_difference
from . import KEY
from .requests import carried
from .settings import (
    Settings,
    batch_invariant,
    check_content,
    logger,
    plain_torch,
    refuse_unsupported,
    unknown_vllm,
)
from .steps import RankClasses, Step, TokenClasses, listen
from .tracing import requests_of, tracing_of

SKIPPED = -1  # the id of a skipped slot: what vLLM itself gives padding
CONFIGURED = "(configured)"  # what is left of the `ace` part once it was read


class Configured(dict[str, Any]):
    """additional_config after it was read: it carries the skipping, and budgets are out of vLLM's compile hash."""

    skipping: Skipping

    def __reduce__(self) -> tuple[Any, ...]:
        """vLLM pickles configurations into its compile cache: there it is a plain dictionary."""
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Configured:
        return self


def find(vllm_config: Any) -> Skipping | None:
    """The skipping of an engine whose layers have been built; None for an engine without ACE."""
    additional = getattr(vllm_config, "additional_config", None)
    return additional.skipping if isinstance(additional, Configured) else None


def configure(vllm_config: Any) -> Skipping | None:
    """The skipping this configuration asks for, built at its first layer; None if it does not ask."""
    additional = getattr(vllm_config, "additional_config", None)
    if isinstance(additional, Configured):
        return additional.skipping
    if not isinstance(additional, dict) or additional.get(KEY, CONFIGURED) == CONFIGURED:
        return None  # no ACE, or the configuration of a draft model, copied from one that was read
    skipping = Skipping(vllm_config, Settings.from_dict(additional[KEY]))
    # what shapes the compiled graph is that our operators are in it, not which budget they use
    vllm_config.additional_config = Configured({**additional, KEY: CONFIGURED})
    vllm_config.additional_config.skipping = skipping
    try:
        listen(find)
    except (ImportError, AttributeError) as error:
        raise unknown_vllm(error) from error
    return skipping


class Skipping:
    """Layers register themselves as vLLM builds them; `change` and `part` serve the control side."""

    def __init__(self, vllm_config: Any, settings: Settings):
        refuse_unsupported(vllm_config, traced=settings.trace is not None)
        self.settings, self.workload, self.model = settings, settings.workload, vllm_config.model_config.model
        plan, policy = settings.open(self.model)
        if _first_rank():
            with plain_torch():
                check_content(plan, self.model, settings.allow_other_weights)
        self.decoder_layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.whole = vllm_config.parallel_config.pipeline_parallel_size == 1
        self.device = torch.device(vllm_config.device_config.device)
        self.classes = TokenClasses(vllm_config.scheduler_config.max_num_batched_tokens, self.device)
        self.deciders = Deciders(plan, policy, BUDGETS, restore=restores(settings.restore))
        self.skip: Budget | None = None  # the server's own; None where a threshold was set
        self.split = False
        self.owned: dict[str, int] = {}  # requests with budgets of their own, and the number of their budget
        self.budgets: list[Budget] = []  # of requests, from number 1 on; number 0 is the server's
        self.tracing = tracing_of(vllm_config, settings, plan.fingerprint, self.device)
        self.later: list[Callable[[], None]] = []  # what waits for vLLM's kernels: executors are chosen then
        self.change(skip=settings.skip)
        logger.info("ACE: policy %s", json.dumps(policy.settings))

    # ---- layers -------------------------------------------------------------------------------------------------

    def add(self, index: int, name: str, sizes: Mapping[str, int], rank: int | None = None) -> Decider | None:
        """The decider of the layer with this number; None for a draft model's layer, which is left as it is.

        `rank`: of a rank that sees only its own part of every step (sequence parallel).
        """
        key, plan = str(index), self.deciders.plan
        structure = plan.fingerprint.structure
        if key in self.deciders or index >= self.decoder_layers:  # the model itself is built before its drafts
            logger.warning("ACE: %s is of a draft model, of which the plan knows nothing: left unskipped.", name)
            return None
        if key not in structure:
            raise PlanError(
                f"The plan has no layer {key} ({name}); it is of another model ({plan.model or 'unnamed'}) or this layer is "
                "built in a way that plans do not cover. Build one with `ace plan MODEL -o FILE`."
            )
        expected = {n: v for n, v in structure[key].items() if n in sizes and v}
        difference = structure_difference({key: expected}, {key: sizes})
        if difference:
            raise PlanError(
                f"The plan is of another model ({plan.model or 'unnamed'}): {difference}. Build one with "
                "`ace plan MODEL -o FILE`."
            )
        if rank is not None:
            self._refuse_parts()
            self.split = True
        return self.deciders.add(
            key,
            skipped=SKIPPED,
            tokens=self.classes if rank is None else RankClasses(self.classes, rank),
            device=self.device,
            kernels=usable(self.device),
            opaque=False,
            trace=None if self.tracing is None else self.tracing.keeper(key),
        )

    def _refuse_parts(self) -> None:
        """Refuse what a rank that sees a part of every step cannot do."""
        if self.settings.track:
            raise IntegrationError(
                "Thresholds cannot keep a budget by themselves (track) where ranks see parts of a step (sequence parallel): they "
                "would drift apart. Serve without `track`, or without sequence parallelism."
            )
        if self.tracing is not None:
            raise IntegrationError(
                "A rank that sees a part of each step (sequence parallel) cannot trace it. Leave out one."
            )

    def ready(self) -> None:
        """Check, after the model is loaded and before it serves, that every layer is there, and choose how it runs."""
        missing = sorted(set(self.deciders.plan.fingerprint.structure) - set(self.deciders))
        if self.whole and missing:
            raise IntegrationError(
                f"vLLM runs layer {missing[0]} (and {len(missing) - 1} more) outside its common MoE layer, where ACE cannot "
                "skip. This model is not supported in vLLM; serve it without `ace`."
            )
        for choose in self.later:
            choose()
        if self.settings.track and self.deciders:
            self.deciders.control()
            last = max(self.deciders, key=int)
            self.deciders[last].after = self.deciders.after_step

    # ---- steps --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget what warm-ups ran: it is not a request's."""
        self.classes.clear()
        self.deciders.reset()
        if self.tracing is not None:
            self.tracing.forget()

    def step(self, step: Step, runner: Any, result: Any) -> None:
        """Say what each token is of the step that is about to run."""
        if self.tracing is not None:
            names = requests_of(runner, result, len(step.lengths))
            budgets = [self.skip, *self.budgets]
            self.tracing.begin(step, names, [None if b is None else b.to_json() for b in budgets])
        self.classes.mark(step)

    @contextmanager
    def dummy(self, profile: bool) -> Iterator[None]:
        """A pass without requests: all padding, or a measuring pass whose tokens are run and not counted."""
        if self.tracing is not None:
            self.tracing.flush()
        if not profile:
            self.classes.clear()
            yield
            return
        self.classes.counting = False
        self.classes.profile()
        try:
            yield
        finally:
            self.classes.counting = True
            self.classes.clear()

    def admit(self, scheduled: Any, alive: Container[str]) -> None:
        """Note a step's requests with budgets of their own, of those the runner knows; all ranks see the same, in one order.

        Not by what a step says has ended: a step without tokens says so too and is never prepared, and the name of one that
        was given up may come back in the same step.
        """
        for request in [r for r in self.owned if r not in alive]:
            del self.owned[request]
        for new in scheduled.scheduled_new_reqs:  # a preempted one may come as new again
            self.owned.pop(new.req_id, None)
            if number := self._number(new):
                self.owned[new.req_id] = number

    def _number(self, request: Any) -> int:
        """The number of a request's budget; 0, the server's own, also where none can be had: in the middle of a step an error
        would end the engine, and admission has refused what the plan does not know."""
        try:
            budget = carried(request.sampling_params)
            if budget is None:
                return 0
            if budget not in self.budgets:
                self._take_in(budget)
            return self.budgets.index(budget) + 1
        except Exception as error:
            logger.error("ACE: request %s runs under the server's own budget: %s", request.req_id, error)
            return 0

    def _take_in(self, budget: Budget) -> None:
        """Set τ of a further budget, by the text the server was started with: front ends have looked it up there."""
        number = len(self.budgets) + 1
        if number == BUDGETS:
            raise OptionError(f"there is no room for a budget of {budget}.")
        thresholds = self.settings.lookup(self.deciders.plan, self.deciders.policy, budget)
        self.deciders.set(thresholds.tau, number, thresholds.targets)
        self.budgets.append(budget)

    # ---- control ------------------------------------------------------------------------------------------------

    def change(
        self,
        skip: Budget | None = None,
        threshold: float | Sequence[float] | None = None,
        restore: bool | None = None,
        workload: str | None = None,
    ) -> None:
        """Set another budget (by the thresholds of a text), τ itself, or whether slots are restored: all of it or nothing.

        τ is copied into the tensor the kernels read, so it is in force at once.
        """
        if (skip is None) == (threshold is None) and (restore is None or skip is not None):
            raise OptionError('Give either a budget ("skip") or a threshold, not both and not none.')
        thresholds = None
        if skip is not None:
            workload = workload or self.workload
            thresholds = self.settings.lookup(self.deciders.plan, self.deciders.policy, skip, workload)
        elif threshold is not None:
            thresholds = Thresholds(check_threshold(threshold))
        if restore is not None:
            self.deciders.restore(restore)
        if thresholds is not None:
            self.deciders.set(thresholds.tau, targets=thresholds.targets)
            self.skip, self.workload = skip, workload or self.workload
            said = ", ".join(f"{tau:.6f}" for tau in thresholds.tau.tolist())
            logger.info("ACE: budget %s: τ = %s in prefill, decode and verify", skip, said)

    def reset(self) -> None:
        """Set counters to zero."""
        self.deciders.reset()

    def part(self, **place: Any) -> Part:
        """What this process has to say for a report."""
        if self.tracing is not None:  # nobody waits for the last step of a busy hour
            self.tracing.flush()
            self.tracing.save()
        skip = None if self.skip is None else self.skip.to_json()
        return self.deciders.part(skip=skip, split=self.split, budgets=[str(b) for b in self.budgets], **place)


def restores(wanted: bool | None) -> bool:
    """Whether slots are restored: by default, unless results may not depend on who else is served."""
    invariant = batch_invariant()
    if wanted and invariant:
        raise IntegrationError(
            "restore makes what a token runs depend on its batch, and VLLM_BATCH_INVARIANT asks that nothing does. Leave one out."
        )
    return not invariant if wanted is None else wanted


def _first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0
