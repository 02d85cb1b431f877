"""Budgets of single requests: checked where vLLM admits a request, carried in its sampling parameters, and kept apart in
vLLM's prefix cache, because a prompt's keys and values depend on what was skipped.

    extra_body={"vllm_xargs": {"ace_skip": 0.3}}                     the OpenAI API
    SamplingParams(extra_args={"ace_skip": 0.3})                     the offline engine

`ace_skip_prefill` and `ace_skip_decode` name both phases instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from ...decider.rows import BUDGETS, Budget
from ...decider.tracking import look_up
from ...errors import AceError, OptionError
from .settings import Settings, settings_of

NAME = "ace_skip"
BY_PHASE = (f"{NAME}_prefill", f"{NAME}_decode")
MARK = "_ace_hooked"


def asked(params: Any) -> Budget | None:
    """What a request's parameters ask for; None if nothing. An error that names the value if it means nothing."""
    extra = getattr(params, "extra_args", None)
    given = {} if not isinstance(extra, Mapping) else {k: v for k, v in extra.items() if str(k).startswith(NAME)}
    if not given:
        return None
    if set(given) == {NAME}:
        return Budget(*[_number(given[NAME])] * 2)
    if set(given) == set(BY_PHASE):
        return Budget(*(_number(given[name]) for name in BY_PHASE))
    raise OptionError(f"A request names {NAME}, or {BY_PHASE[0]} and {BY_PHASE[1]}; not {', '.join(map(str, given))}.")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value < 1:
        raise OptionError(
            f"{NAME} is a fraction from 0 to less than 1 of the routed slots, such as 0.3; not {value!r:.60}."
        )
    return round(float(value), 2)


class Admission:
    """Whether the engine can serve a request's budget, known before anything is scheduled."""

    def __init__(self, vllm_config: Any, settings: Settings, alone: bool = False):
        self.settings, self.model = settings, vllm_config.model_config.model
        servers = 1 if alone else max(1, getattr(vllm_config.parallel_config, "_api_process_count", 1) or 1)
        self.most = max(1, (BUDGETS - 1) // servers)  # each front end knows only the requests it admits
        self.known: set[Budget] = set()
        self._opened: tuple[Any, Any] | None = None

    def check(self, params: Any) -> Budget | None:
        budget = asked(params)
        if budget is None or budget in self.known:
            return budget
        if len(self.known) >= self.most:
            served = ", ".join(str(b) for b in sorted(self.known))
            raise OptionError(
                f"This server has room for {self.most} budgets of requests and serves {served}. Use one of these."
            )
        self._opened = self._opened or self.settings.open(self.model)
        plan, policy = self._opened
        look_up(plan, policy, budget.skip, self.settings.workload, self.settings.control)
        self.known.add(budget)
        return budget


def admission_of(processor: Any, alone: bool = False) -> Admission | None:
    """The admission of a front end, or of an engine core (`alone`: it sees every request), made at its first request; None
    without ACE."""
    found = vars(processor).get("ace_admission")
    if found is None:
        settings = settings_of(processor.vllm_config)
        if settings is None:
            return None
        found = processor.ace_admission = Admission(processor.vllm_config, settings, alone)
    return found


def salted(prefix: str, salt: str | None) -> str:
    """A prefix-cache salt beside the user's own; its length in front makes two users' never meet."""
    return f"{prefix};{len(salt or '')}:{salt or ''}"


# ---- hooks ------------------------------------------------------------------------------------------------------


def listen() -> None:
    """Hook vLLM's admission and its engine core, on the classes: without an `ace` configuration they do as before."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    if MARK not in vars(InputProcessor):
        InputProcessor.process_inputs = _admitting(InputProcessor.process_inputs)
        setattr(InputProcessor, MARK, True)
    if MARK not in vars(EngineCore):
        EngineCore.preprocess_add_request = _in_epochs(EngineCore.preprocess_add_request)
        EngineCore.collective_rpc = _beginning_epochs(EngineCore.collective_rpc)
        setattr(EngineCore, MARK, True)


def _admitting(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        admission = admission_of(self)
        budget = None if admission is None else _checked(admission, params)
        request = stock(self, request_id, prompt, params, *args, **kwargs)
        if budget is not None:
            request.cache_salt = salted(f"ace={budget}", request.cache_salt)
        return request

    return process_inputs


def _checked(admission: Admission, params: Any) -> Budget | None:
    try:
        return admission.check(params)
    except AceError as error:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _in_epochs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Requests under the server's own budget: what was cached before it was changed is not theirs.

    Not every front end is ours to hook (vLLM's in Rust): what a request asks for is looked at here again. An error is this
    request's alone; in the middle of a step it would end the engine.
    """

    @wraps(stock)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        admission, salt = admission_of(self, alone=True), request.cache_salt or ""
        budget = None if admission is None else admission.check(request.sampling_params)
        own, epoch = f"ace={budget}", vars(self).get("_ace_epoch", 0)
        if budget is not None:
            request.cache_salt = salt if salt.startswith(f"{own};") else salted(own, salt)
        elif admission is not None and (epoch or salt.startswith("ace")):  # a user's own salt may look like one of ours
            request.cache_salt = salted(f"ace#{epoch}", salt)
        return stock(self, request)

    return preprocess_add_request


def _beginning_epochs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A change of what the workers skip begins an epoch, whoever asks for it; one that is refused begins none.

    Behind the change: a request that came in between is of the old epoch, which none will read from again. Of a new one it
    would leave what it computed before the change, and all that begin with the same tokens would read that.
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
