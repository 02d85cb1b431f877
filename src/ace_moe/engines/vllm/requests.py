"""Budgets of single requests: parsed and checked where vLLM admits a request, carried in its sampling parameters, and kept
apart in vLLM's prefix cache, because a prompt's keys and values depend on what was skipped.

    extra_body={"vllm_xargs": {"ace_skip": 0.3}}                     the OpenAI API
    SamplingParams(extra_args={"ace_skip": 0.3})                     the offline engine

`ace_skip_prefill` and `ace_skip_decode` name both phases instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from ...budget import Budget
from ...decider.rows import BUDGETS
from ...errors import AceError, OptionError
from .settings import Settings, settings_of

NAME = "ace_skip"
BY_PHASE = (f"{NAME}_prefill", f"{NAME}_decode")
MARK = "_ace_hooked"


def asked(params: Any) -> Budget | None:
    """Parse the budget in a request's parameters, in hundredths; None without one."""
    extra = getattr(params, "extra_args", None)
    named = {k: v for k, v in extra.items() if str(k).startswith(NAME)} if isinstance(extra, Mapping) else {}
    if not named:
        return None
    if set(named) == {NAME}:
        return Budget.parse(named[NAME]).rounded()
    if set(named) == set(BY_PHASE):
        prefill, decode = (named[name] for name in BY_PHASE)
        return Budget.parse({"prefill": prefill, "decode": decode}).rounded()
    raise OptionError(f"A request names {NAME}, or {BY_PHASE[0]} and {BY_PHASE[1]}; not {', '.join(map(str, named))}.")


def carry(params: Any, budget: Budget) -> None:
    """Leave the budget in the parameters in full, for workers to read as it stands."""
    others = {k: v for k, v in params.extra_args.items() if not str(k).startswith(NAME)}
    params.extra_args = {**others, NAME: budget._asdict()}


def carried(params: Any) -> Budget | None:
    """The budget that admission left in the parameters."""
    extra = getattr(params, "extra_args", None) or {}
    return Budget(**extra[NAME]) if NAME in extra else None


class Admission:
    """What requests may ask of the engine: checked before anything is scheduled, against the plan as it was at start.

    `alone`: of an engine core, which sees the requests of all front ends.
    """

    def __init__(self, vllm_config: Any, settings: Settings, alone: bool = False):
        servers = 1 if alone else max(1, getattr(vllm_config.parallel_config, "_api_process_count", 1) or 1)
        self.most = max(1, (BUDGETS - 1) // servers)  # each front end knows only the requests it admits
        self.known: set[Budget] = set()
        self.settings = settings
        self.plan = settings.read(vllm_config.model_config.model)
        self.policy = settings.chosen(self.plan)

    def check(self, params: Any) -> Budget | None:
        """The budget of a request that can be served, or an error that says why not."""
        budget = asked(params)
        if budget is None or budget in self.known:
            return budget
        if len(self.known) >= self.most:
            served = ", ".join(str(b) for b in sorted(self.known))
            raise OptionError(
                f"This server has room for {self.most} budgets of requests and serves {served}. Use one of these."
            )
        self.settings.lookup(self.plan, self.policy, budget)
        self.known.add(budget)
        return budget


def admission_of(processor: Any, alone: bool = False) -> Admission | None:
    """The admission of a front end or of an engine core (`alone`), made when it starts; None without ACE."""
    if "ace_admission" not in vars(processor):
        settings = settings_of(processor.vllm_config)
        processor.ace_admission = None if settings is None else Admission(processor.vllm_config, settings, alone)
    return processor.ace_admission


def salted(prefix: str, salt: str | None) -> str:
    """A prefix-cache salt beside the user's own; its length in front makes two users' never meet."""
    return f"{prefix};{len(salt or '')}:{salt or ''}"


# ---- hooks ------------------------------------------------------------------------------------------------------


def listen() -> None:
    """Hook vLLM's admission and its engine core, on the classes: without an `ace` configuration they do as before.

    `InputProcessor.process_inputs` sees every request of a front end, `EngineCore.preprocess_add_request` those of all front
    ends, also of vLLM's in Rust, which has no hooks; an error in either is the request's alone. A core is hooked while it
    starts, so the first of its methods that is called later (`_initialize_kv_caches`) makes its admission.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    if MARK not in vars(InputProcessor):
        InputProcessor.__init__ = opening(InputProcessor.__init__)
        InputProcessor.process_inputs = admitting(InputProcessor.process_inputs)
        setattr(InputProcessor, MARK, True)
    if MARK not in vars(EngineCore):
        EngineCore._initialize_kv_caches = opening(EngineCore._initialize_kv_caches, alone=True)
        EngineCore.preprocess_add_request = in_epochs(EngineCore.preprocess_add_request)
        EngineCore.collective_rpc = beginning_epochs(EngineCore.collective_rpc)
        setattr(EngineCore, MARK, True)


def opening(stock: Callable[..., Any], alone: bool = False) -> Callable[..., Any]:
    """Read the plan at start: another command may write into its file while the server runs."""

    @wraps(stock)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        admission_of(self, alone)
        return result

    return start


def admitting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        admission = admission_of(self)
        budget = None if admission is None else _checked(admission, params)
        request = stock(self, request_id, prompt, params, *args, **kwargs)
        if budget is not None:
            carry(request.sampling_params, budget)  # vLLM's own copy, not the user's
            request.cache_salt = salted(f"ace={budget}", request.cache_salt)
        return request

    return process_inputs


def _checked(admission: Admission, params: Any) -> Budget | None:
    try:
        return admission.check(params)
    except AceError as error:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def in_epochs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Check requests of front ends that have no hooks, and keep what is cached under the server's own budget apart by epoch."""

    @wraps(stock)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        admission, salt = admission_of(self, alone=True), request.cache_salt or ""
        budget = None if admission is None else admission.check(request.sampling_params)
        own, epoch = f"ace={budget}", vars(self).get("_ace_epoch", 0)
        if budget is not None:
            carry(request.sampling_params, budget)
            request.cache_salt = salt if salt.startswith(f"{own};") else salted(own, salt)
        elif admission is not None and (epoch or salt.startswith("ace")):  # a user's own salt may look like one of ours
            request.cache_salt = salted(f"ace#{epoch}", salt)
        return stock(self, request)

    return preprocess_add_request


def beginning_epochs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Bump the epoch after a change of what the workers skip, whoever asks for it; one that is refused bumps nothing.

    After the change: requests admitted in between stay in the old cache namespace, which no later request reads. In the new
    one they would leave what they computed before the change.
    """

    @wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        refused = False
        try:
            replies = stock(self, method, *args, **kwargs)
            refused = method == "ace_set" and all("error" in reply for reply in replies)
            return replies
        finally:
            if method == "ace_set" and not refused:
                self._ace_epoch = vars(self).get("_ace_epoch", 0) + 1

    return collective_rpc
