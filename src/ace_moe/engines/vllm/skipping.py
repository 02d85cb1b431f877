"""The skipping of one engine in one process: its runtime, the rows of its steps, and how vLLM's layers join it."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...decider import Layer, Part, Runtime
from ...decider.rows import BUDGETS, Budget
from ...decider.settings import Skip, check_threshold
from ...decider.tracking import look_up
from ...errors import AceError, IntegrationError, PlanError
from ...kernels import usable
from ...plan import structure_difference
from . import KEY
from .requests import asked
from .rows import Rows, Share, Step, listen
from .settings import Settings, batch_invariant, check_content, logger, refuse_unsupported, unknown_vllm
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
    """Layers register themselves as vLLM builds them; `set_skip` and `part` serve the control side."""

    def __init__(self, vllm_config: Any, settings: Settings):
        refuse_unsupported(vllm_config, traced=settings.trace is not None)
        self.settings, self.workload, self.model = settings, settings.workload, vllm_config.model_config.model
        with plain_torch():
            plan, policy = settings.open(self.model)
            if _first_rank():
                check_content(plan, self.model, settings.allow_other_weights)
        self.decoder_layers = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.whole = vllm_config.parallel_config.pipeline_parallel_size == 1
        self.device = torch.device(vllm_config.device_config.device)
        self.rows = Rows(vllm_config.scheduler_config.max_num_batched_tokens, self.device)
        self.runtime = Runtime(plan, policy, BUDGETS, restore=restores(settings.restore))
        self.skip: Skip | None = None
        self.split = False
        self.owned: dict[str, int] = {}  # requests with budgets of their own, and the number of their budget
        self.budgets: list[Budget] = []  # of requests; number 0 is the server's
        self.tracing = tracing_of(vllm_config, settings, plan.fingerprint, self.device)
        self.later: list[Callable[[], None]] = []  # what waits for vLLM's kernels: executors are chosen then
        self.set_skip(settings.skip)
        logger.info("ACE: policy %s", json.dumps(policy.settings))

    @property
    def policy(self) -> Any:
        return self.runtime.policy

    def describe(self) -> str:
        prefill, decode, verify = self.runtime.state.tau[1:4].tolist()
        return f"budget {self.skip!r}: τ = {prefill:.6f} in prefill, {decode:.6f} in decode, {verify:.6f} in verify"

    # ---- layers -------------------------------------------------------------------------------------------------

    def add(self, index: int, name: str, found: Mapping[str, int]) -> Layer | None:
        """The layer with this decoder number; None for a draft model's layer, which is left as it is."""
        key, plan = str(index), self.runtime.plan
        structure = plan.fingerprint.structure
        if key in self.runtime.layers or index >= self.decoder_layers:  # the model itself is built before its drafts
            logger.warning("ACE: %s is of a draft model, of which the plan knows nothing: left unskipped.", name)
            return None
        if key not in structure:
            raise PlanError(
                f"The plan has no layer {key} ({name}); it is of another model ({plan.model or 'unnamed'}) or this layer is "
                "built in a way `ace tables` does not cover. Build one with `ace tables`."
            )
        wanted = {n: v for n, v in structure[key].items() if n in found and v}
        difference = structure_difference({key: wanted}, {key: found})
        if difference:
            raise PlanError(
                f"The plan is of another model ({plan.model or 'unnamed'}): {difference}. Build one with `ace tables`."
            )
        layer = self.runtime.add(key, SKIPPED, self.device, kernels=usable(self.device), opaque=False)
        layer.tokens = self.rows
        if self.tracing is not None:
            layer.trace = self.tracing.keeper(key)
        return layer

    def divide(self, layer: Layer, rank: int) -> None:
        """The layer sees only this rank's part of every step."""
        if self.settings.track:
            raise IntegrationError(
                "Thresholds cannot keep a budget by themselves (track) where ranks see parts of a step (sequence parallel): they "
                "would drift apart. Serve without `track`, or without sequence parallelism."
            )
        if self.tracing is not None:
            raise IntegrationError(
                "A rank that sees a part of each step (sequence parallel) cannot trace it. Leave out one."
            )
        layer.tokens, self.split = Share(self.rows, rank), True

    def ready(self) -> None:
        """After the model is loaded and before it serves: every layer is there and knows how it runs."""
        missing = sorted(set(self.runtime.plan.fingerprint.structure) - set(self.runtime.layers))
        if self.whole and missing:
            raise IntegrationError(
                f"vLLM runs layer {missing[0]} (and {len(missing) - 1} more) outside its common MoE layer, where ACE cannot "
                "skip. This model is not supported in vLLM; serve it without `ace`."
            )
        for choose in self.later:
            choose()
        if self.settings.track and self.runtime.layers:
            self.runtime.track()
            last = max(self.runtime.layers, key=int)
            self.runtime.layers[last].after = self.runtime.after_step

    def begin(self) -> None:
        """Warm-ups are over: what they ran is no request's."""
        self.rows.clear()
        self.reset()
        if self.tracing is not None:
            self.tracing.forget()

    def trace(self, step: Step, runner: Any, result: Any) -> None:
        """What a step computes is about to be traced."""
        assert self.tracing is not None
        names, skips = requests_of(runner, result, len(step.lengths)), [self.skip, *(b.skip for b in self.budgets)]
        self.tracing.begin(step, names, skips)

    @contextmanager
    def dummy(self, profile: bool) -> Iterator[None]:
        """A pass without requests: all padding, or a measuring pass whose tokens are run and not counted."""
        if self.tracing is not None:
            self.tracing.flush()
        if not profile:
            self.rows.clear()
            yield
            return
        self.rows.counting = False
        self.rows.profile()
        try:
            yield
        finally:
            self.rows.counting = True
            self.rows.clear()

    # ---- control ------------------------------------------------------------------------------------------------

    def set_skip(self, skip: Skip, workload: str | None = None) -> None:
        """Another budget, at once: τ is copied into the tensor the kernels read. `workload`: by the thresholds of this text."""
        before, self.workload = self.workload, workload or self.workload
        try:
            self._set(skip)
        except AceError:
            self.workload = before
            raise
        self.skip = dict(skip) if isinstance(skip, Mapping) else skip
        logger.info("ACE: %s", self.describe())

    def _set(self, skip: Skip, number: int = 0) -> None:
        """Requests' budgets go by the text the server was started with: front ends have looked them up there."""
        workload = self.settings.workload if number else self.workload
        tau, targets = look_up(self.runtime.plan, self.policy, skip, workload, self.settings.control)
        self.runtime.set(tau, number, targets)

    def admit(self, scheduled: Any, alive: Container[str]) -> None:
        """Requests of a step with budgets of their own, of those the runner knows; all ranks see the same, in the same order.

        Not by what a step says has ended: a step without tokens says so too and is never prepared, and the name of one that
        was given up may come back in the same step.
        """
        for request in [r for r in self.owned if r not in alive]:
            del self.owned[request]
        for new in scheduled.scheduled_new_reqs:  # a preempted one may come as new again
            budget = asked(new.sampling_params)
            if budget is not None:
                self.owned[new.req_id] = self._number(budget)
            else:
                self.owned.pop(new.req_id, None)

    def _number(self, budget: Budget) -> int:
        if budget not in self.budgets:
            if len(self.budgets) + 1 == BUDGETS:  # front ends do not let it come to this
                logger.error("ACE: no room for a budget of %s; the request runs under the server's own.", budget)
                return 0
            self._set(budget.skip, len(self.budgets) + 1)
            self.budgets.append(budget)
        return self.budgets.index(budget) + 1

    def set_restore(self, on: bool) -> None:
        self.runtime.restore(on)

    def set_threshold(self, threshold: Any) -> None:
        """τ itself, for all phases or as [prefill, decode]."""
        self.runtime.set(check_threshold(threshold))
        self.skip = None

    def reset(self) -> None:
        self.runtime.reset()

    def part(self, **place: Any) -> Part:
        if self.tracing is not None:  # nobody waits for the last step of a busy hour
            self.tracing.flush()
            self.tracing.save()
        return self.runtime.part(skip=self.skip, split=self.split, budgets=[str(b) for b in self.budgets], **place)


def restores(wanted: bool | None) -> bool:
    """Whether slots are restored: by default, unless results may not depend on who else is served."""
    invariant = batch_invariant()
    if wanted and invariant:
        raise IntegrationError(
            "restore makes what a token runs depend on its batch, and VLLM_BATCH_INVARIANT asks that nothing does. Leave one out."
        )
    return not invariant if wanted is None else wanted


@contextmanager
def plain_torch() -> Iterator[None]:
    """vLLM builds layers under the model's own default type and device; reading a checkpoint must not inherit them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_rank() == 0
