"""What every token of a step is (its class: phase × budget), in one device buffer that graphs can read.

A vLLM step mixes requests of all phases and is padded to a captured size, and with CUDA graphs none of our Python code
runs while the model does. So classes are written into a buffer before the forward pass, from what the model runner has
just scheduled; kernels inside the graph read them there. A steady decode writes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...decider.rows import PADDING, row_of
from ...errors import IntegrationError

PREFILL, DECODE, VERIFY = (row_of(phase) for phase in ("prefill", "decode", "verify"))
KINDS = np.array([PREFILL, DECODE, VERIFY], dtype=np.int8)
HEADROOM = 1024  # tokens that padding may add to the largest batch
MARK = "_ace_hooked"


class Step(NamedTuple):
    """What a step computes of each request, in the order of the batch; all [requests]."""

    lengths: np.ndarray  # tokens
    computed: np.ndarray  # tokens computed before
    prompts: np.ndarray  # tokens of its prompt
    drafts: np.ndarray | None = None  # how many of the tokens are drafts, at the end of each query
    budgets: np.ndarray | None = None  # the number of each one's budget; None: all have the server's
    # [requests + 1] on the device, where each one's tokens begin, if only the device knows how many of its drafts are verified:
    # lengths and drafts are then the most there may be
    starts: Tensor | None = None
    tokens: int = 0  # of all requests together, where `starts` is given


def pieces_of(step: Step) -> np.ndarray:
    """[requests, 3]: how many tokens of each query are prompt, then generated, then drafts.

    By position, so that a preempted request's tokens are what they were when it computes them again.
    """
    pieces = np.empty((len(step.lengths), 3), dtype=np.int64)
    prompt, generated, drafts = pieces.T
    np.minimum(step.prompts - step.computed, step.lengths, out=prompt)
    np.maximum(prompt, 0, out=prompt)
    np.subtract(step.lengths, prompt, out=generated)
    drafts[:] = 0 if step.drafts is None else np.minimum(step.drafts, generated)
    generated -= drafts
    return pieces


def classes_of(pieces: np.ndarray, budgets: np.ndarray | None = None) -> np.ndarray:
    """The class of each token, [tokens] int8."""
    kinds = np.tile(KINDS, len(pieces))
    if budgets is not None:
        kinds += np.repeat(budgets * len(KINDS), len(KINDS)).astype(np.int8)
    return np.repeat(kinds, pieces.ravel())


class TokenClasses:
    """[most tokens] int8 on the device, padding where no request's token is."""

    def __init__(self, most_tokens: int, device: torch.device | str):
        with torch.inference_mode(False):
            self.buffer = torch.full((most_tokens + HEADROOM,), PADDING, dtype=torch.int8, device=device)
        self.counting = self.generating = True
        self._written: Any = None  # what the buffer shows; None: all padding
        self._tokens = 0  # how many of its entries are not padding

    def mark(self, step: Step) -> None:
        """Write the buffer, where a step is not like the one before; about 15 µs on the host for 256 requests."""
        pieces, budgets = pieces_of(step), step.budgets
        self.generating = bool(pieces[:, 1:].any())
        if step.starts is not None:
            return self._mark_by(step.starts, step.tokens, pieces, budgets)
        key = pieces.tobytes(), None if budgets is None else budgets.tobytes()
        if key == self._written:
            return
        classes = classes_of(pieces, budgets)
        shown = np.full(max(len(classes), self._tokens), PADDING, dtype=np.int8)
        shown[: len(classes)] = classes
        # in stream order, behind the step that still reads the buffer; small: the driver stages it and the host goes on
        self.buffer[: len(shown)].copy_(torch.from_numpy(shown), non_blocking=True)
        self._written, self._tokens = key, len(classes)

    def _mark_by(self, starts: Tensor, tokens: int, pieces: np.ndarray, budgets: np.ndarray | None) -> None:
        """Mark by where tokens begin on the device: what is neither prompt nor generated is a draft, as many as there are."""
        at = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
        request = torch.searchsorted(starts[1 : len(pieces) + 1], at, right=True)
        edges = torch.from_numpy(pieces[:, :2].cumsum(1)).to(starts.device, non_blocking=True)
        passed = (at - starts[request]).unsqueeze(1) >= edges[request]
        classes = torch.from_numpy(KINDS).to(starts.device)[passed.sum(1)]
        if budgets is not None:
            classes += (torch.from_numpy(budgets * len(KINDS)).to(starts.device)[request]).to(torch.int8)
        self.buffer[:tokens].copy_(classes)
        self.buffer[tokens : max(tokens, self._tokens)].fill_(PADDING)
        self._written, self._tokens = b"", tokens

    def clear(self) -> None:
        """Show all padding, for a pass without requests (capture, a rank that keeps others company)."""
        self.generating = True
        if self._written is not None:
            self.buffer.fill_(PADDING)
            self._written, self._tokens = None, 0

    def profile(self) -> None:
        """Show all prompt: a pass that measures memory or warms kernels up must run experts."""
        self.generating = True
        self.buffer.fill_(PREFILL)
        self._written, self._tokens = b"", len(self.buffer)

    def rows(self, tokens: int, device: torch.device, start: int = 0) -> Tensor:
        """[tokens] int8, from `start` where a rank sees only its part of the batch."""
        if start + tokens > len(self.buffer):
            raise IntegrationError(
                f"A step of {start + tokens} tokens is larger than the {len(self.buffer)} that vLLM announced. Please report "
                "this with your vLLM flags."
            )
        return self.buffer[start : start + tokens]


class RankClasses:
    """The classes of a rank that sees its own part of every step (sequence parallel)."""

    def __init__(self, classes: TokenClasses, rank: int):
        self.all, self.rank = classes, rank

    @property
    def counting(self) -> bool:
        return self.all.counting

    @property
    def generating(self) -> bool:
        return self.all.generating

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        return self.all.rows(tokens, device, self.rank * tokens)


# ---- where they come from -------------------------------------------------------------------------------------------


def listen(find: Callable[[Any], Any]) -> None:
    """Have vLLM's model runners tell us what each step computes. `find(vllm_config)` gives the engine's skipping.

    Both generations of the runner are hooked, on the class, because the instance exists before the first layer does.
    This happens only once a configured layer is built: without configuration vLLM is as it was.
    """
    from vllm.v1.worker import gpu_model_runner, gpu_worker

    hook_worker(gpu_worker.Worker, find)
    hook_runner(gpu_model_runner.GPUModelRunner, "_prepare_inputs", step_v1, find)
    try:
        from vllm.v1.worker.gpu import model_runner
    except ImportError:  # it needs Triton, which a CPU build does not have
        return
    hook_runner(model_runner.GPUModelRunner, "prepare_inputs", step_v2, find)


Owned = Mapping[str, int]  # requests with budgets of their own, and the budget's number


def alive(runner: Any) -> Container[str]:
    """The requests a runner knows; the newer one drops what is preempted, which it is told of again as new."""
    return runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests


def numbers(requests: Sequence[str], owned: Owned) -> np.ndarray | None:
    return np.array([owned.get(i, 0) for i in requests], dtype=np.int64) if owned else None


def step_v1(runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, owned: Owned) -> Step:
    scheduled = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
    lengths = np.asarray(kwargs["num_scheduled_tokens"] if "num_scheduled_tokens" in kwargs else args[1])
    batch, n, drafted = runner.input_batch, len(lengths), scheduled.scheduled_spec_decode_tokens
    drafts = np.array([len(drafted.get(i, ())) for i in batch.req_ids[:n]]) if drafted else None
    computed, prompts = batch.num_computed_tokens_cpu[:n], batch.num_prompt_tokens[:n]
    return Step(lengths, computed, prompts, drafts, numbers(batch.req_ids[:n], owned))


def step_v2(runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, owned: Owned) -> Step:
    """`prompt_len`, not `prefill_len`: that one grows by what a preempted request had generated."""
    lengths = np.asarray(result.num_scheduled_tokens)
    prompts = runner.req_states.prompt_len.np[result.idx_mapping_np]
    drafts = result.num_draft_tokens_per_req  # the most of each request
    trimmed = int(lengths.sum()) != result.num_tokens  # adaptive verification: the device alone knows of which drafts
    starts = result.query_start_loc if trimmed else None
    budgets = numbers(result.req_ids, owned)
    return Step(lengths, result.num_computed_tokens_np, prompts, drafts, budgets, starts, result.num_tokens)


def hook_runner(cls: type, prepare: str, step: Callable[..., Step], find: Callable[[Any], Any]) -> None:
    if MARK in vars(cls):
        return
    prepare_inputs, dummy_run, make_cache = (getattr(cls, n) for n in (prepare, "_dummy_run", "initialize_kv_cache"))
    arguments = inspect.signature(dummy_run)

    @wraps(prepare_inputs)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_inputs(self, *args, **kwargs)
        skipping = find(self.vllm_config)
        if skipping is not None:
            scheduled = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
            skipping.admit(scheduled, alive(self))
            skipping.step(step(self, args, kwargs, result, skipping.owned), self, result)
        return result

    @wraps(dummy_run)
    def dummy(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = find(self.vllm_config)
        if skipping is None:
            return dummy_run(self, *args, **kwargs)
        with skipping.dummy(bool(arguments.bind(self, *args, **kwargs).arguments.get("is_profile"))):
            return dummy_run(self, *args, **kwargs)

    @wraps(make_cache)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.ready()  # weights and kernels are there: what cannot run is refused now, not at a request
        return make_cache(self, *args, **kwargs)

    for name, ours in ((prepare, prepared), ("_dummy_run", dummy), ("initialize_kv_cache", loaded), (MARK, True)):
        setattr(cls, name, ours)


def hook_worker(cls: type, find: Callable[[Any], Any]) -> None:
    """The newer runner warms up with requests of its own making and captures its graphs behind the last of them."""
    if MARK in vars(cls):
        return
    warm_up = cls.compile_or_warm_up_model  # type: ignore[attr-defined]

    @wraps(warm_up)
    def warmed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warm_up(self, *args, **kwargs)
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.begin()
        return result

    for name, ours in (("compile_or_warm_up_model", warmed), (MARK, True)):
        setattr(cls, name, ours)
