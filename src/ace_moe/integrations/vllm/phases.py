"""Which phase every token of a step is in: prefill, decode or padding, in one device buffer that graphs can read.

A vLLM step mixes requests of both phases and is padded to a captured size, and with CUDA graphs none of our Python code
runs while the model does. So the phases are written into a buffer before the forward pass, from the query lengths the
model runner has just scheduled; kernels inside the graph read them there. A steady decode writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import IntegrationError
from ...skipper import DECODE, PREFILL

PADDING = 2
HEADROOM = 1024  # tokens that padding may add to the largest batch
MARK = "_ace_hooked"


class Phases:
    """[most tokens] int8: 0 prefill, 1 decode, 2 padding. A query longer than `decode_length` is prefill."""

    def __init__(self, most_tokens: int, device: torch.device | str):
        self.buffer = torch.full((most_tokens + HEADROOM,), PADDING, dtype=torch.int8, device=device)
        self.decode_length = 1
        self._written: bytes | None = None  # the query lengths that the buffer shows
        self._tokens = 0  # how many of its entries are not padding

    def mark(self, lengths: np.ndarray) -> None:
        """lengths [requests]: how many tokens of each request this step computes, in the order of the batch."""
        key = lengths.tobytes()
        if key == self._written:
            return
        kind = np.where(lengths > self.decode_length, PREFILL, DECODE).astype(np.int8)
        tokens = np.repeat(kind, lengths)
        shown = np.full(max(len(tokens), self._tokens), PADDING, dtype=np.int8)
        shown[: len(tokens)] = tokens
        self.buffer[: len(shown)].copy_(torch.from_numpy(shown), non_blocking=True)  # small: staged at once, no sync
        self._written, self._tokens = key, len(tokens)

    def clear(self) -> None:
        """All padding: a pass without requests (profiling, capture, a rank that keeps others company)."""
        if self._written is not None:
            self.buffer.fill_(PADDING)
            self._written, self._tokens = None, 0

    def of(self, tokens: int, start: int = 0) -> Tensor:
        """[tokens] int8, from `start` where a rank sees only its part of the batch."""
        if start + tokens > len(self.buffer):
            raise IntegrationError(
                f"A step of {start + tokens} tokens is larger than the {len(self.buffer)} that vLLM announced. Please report "
                "this with your vLLM flags."
            )
        return self.buffer[start : start + tokens]


# ---- where the lengths come from --------------------------------------------------------------------------------


def listen(find: Callable[[Any], Any]) -> None:
    """Have vLLM's model runners tell us the query lengths of each step. `find(vllm_config)` gives the engine's skipping.

    Both generations of the runner are hooked, on the class, because the instance exists before the first layer does.
    This happens only once a configured layer is built: without configuration vLLM is as it was.
    """
    from vllm.v1.worker import gpu_model_runner

    _hook(gpu_model_runner.GPUModelRunner, "_prepare_inputs", _lengths_v1, find)
    try:
        from vllm.v1.worker.gpu import model_runner
    except ImportError:  # it needs Triton, which a CPU build does not have
        return
    _hook(model_runner.GPUModelRunner, "prepare_inputs", _lengths_v2, find)


def _lengths_v1(runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> np.ndarray:
    return kwargs["num_scheduled_tokens"] if "num_scheduled_tokens" in kwargs else args[1]


def _lengths_v2(runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> np.ndarray:
    return result.num_scheduled_tokens


def _hook(cls: type, prepare: str, lengths: Callable[..., np.ndarray], find: Callable[[Any], Any]) -> None:
    if MARK in vars(cls):
        return
    prepare_inputs, dummy_run, make_cache = (getattr(cls, n) for n in (prepare, "_dummy_run", "initialize_kv_cache"))

    @wraps(prepare_inputs)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_inputs(self, *args, **kwargs)
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.phases.mark(np.asarray(lengths(self, args, kwargs, result)))
        return result

    @wraps(dummy_run)
    def dummy(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.phases.clear()
        return dummy_run(self, *args, **kwargs)

    @wraps(make_cache)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = find(self.vllm_config)
        if skipping is not None:
            skipping.ready(self)  # weights and kernels are there: what cannot run is refused now, not at a request
        return make_cache(self, *args, **kwargs)

    for name, ours in ((prepare, prepared), ("_dummy_run", dummy), ("initialize_kv_cache", loaded), (MARK, True)):
        setattr(cls, name, ours)


def decode_length(runner: Any) -> int:
    """Tokens a decoding request computes in a step: 1, and one more for each speculated token."""
    for name in ("uniform_decode_query_len", "decode_query_len"):
        if hasattr(runner, name):
            return int(getattr(runner, name))
    return 1
