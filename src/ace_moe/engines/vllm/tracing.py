"""A trace of served requests. Graphs run no Python code, so layers copy what their routers say into buffers, which are read
before the next step. Without `trace` in the settings none of this exists."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...budget import PHASES
from ...errors import AceError, IntegrationError
from ...plan import Fingerprint
from ..traces.collector import Collector
from ..traces.file import save_trace
from ..traces.record import Skip
from .settings import logger
from .steps import HEADROOM, Step, classes_of, pieces_of

SAVES = 8  # how often the file is written until it has all its tokens: a server that is killed leaves what it had


class Tracing:
    """`keeper` goes into a layer, `begin` is told of each step; `path` is None on ranks that see what another one writes."""

    def __init__(self, path: Path | None, most: int, fingerprint: Fingerprint, model: str, room: int, device: Any):
        self.path, self.room, self.device = path, room + HEADROOM, device
        self.structure = fingerprint.structure
        self.new = lambda: Collector(fingerprint, most, model)
        self.collector, self.saved = self.new(), 0
        self.buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self.numbers: dict[str, int] = {}  # requests in the order they were first computed
        self.running: Tensor | None = None  # [3, T]: the tokens that the buffers will hold: request, phase, budget
        atexit.register(self.save)

    def keeper(self, key: str) -> Callable[[Tensor, Tensor], None]:
        """What copies a layer's ids and gates [T, k]; captured in graphs like everything else."""
        size = (self.room, int(self.structure[key]["top_k"]))
        with torch.inference_mode(False):
            ids = torch.zeros(size, dtype=torch.int16, device=self.device)
            self.buffers[key] = ids, torch.zeros(size, dtype=torch.bfloat16, device=self.device)

        def keep(found: Tensor, gates: Tensor) -> None:
            for buffer, values in zip(self.buffers[key], (found, gates), strict=True):
                buffer[: len(values)].copy_(values)

        return keep

    def begin(self, step: Step, requests: Sequence[str], skips: Sequence[Skip]) -> None:
        """Before a step runs: the one before it is taken out of the buffers."""
        self.flush()
        if self.collector.full or self.path is None:
            return
        classes = classes_of(pieces_of(step), step.budgets).astype(np.int64) - 1
        numbers = [self.numbers.setdefault(name, len(self.numbers)) for name in requests]
        budgets = np.array([self.collector.budget(skip) for skip in skips])
        tokens = (np.repeat(numbers, step.lengths), classes % len(PHASES), budgets[classes // len(PHASES)])
        self.running = torch.from_numpy(np.stack(tokens))

    def flush(self) -> None:
        """What the last step left. The host waits for the device: tracing costs time while it lasts."""
        tokens, self.running = self.running, None
        if tokens is None or not tokens.numel():
            return
        count = tokens.shape[1]
        self.collector.add(tokens, {key: (ids[:count], gates[:count]) for key, (ids, gates) in self.buffers.items()})
        if self.collector.full or self.collector.tokens - self.saved >= self.collector.most / SAVES:
            self.save()

    def forget(self) -> None:
        """Warm-ups were no requests."""
        self.collector, self.saved, self.numbers, self.running = self.new(), 0, {}, None

    def save(self) -> None:
        """A file that cannot be written is no reason to stop serving."""
        if self.path is None or self.collector.tokens == self.saved:
            return
        self.saved = self.collector.tokens
        try:
            save_trace(self.collector.trace(), self.path)
            logger.info("ACE: %d tokens of %d traced into %s", self.saved, self.collector.most, self.path)
        except AceError as error:
            logger.error("ACE: no trace: %s", error)


def tracing_of(vllm_config: Any, settings: Any, fingerprint: Fingerprint, device: Any) -> Tracing | None:
    """The tracing that the settings ask for. Tensor-parallel ranks see the same tokens: the first writes."""
    if settings.trace is None:
        return None
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise IntegrationError(
            "A trace needs all layers in one process: serve without --pipeline-parallel-size, or --trace."
        )
    path = Path(settings.trace)
    if getattr(parallel, "data_parallel_size", 1) > 1:
        path = path.with_name(f"{path.stem}.{parallel.data_parallel_rank}{path.suffix}")
    first = getattr(parallel, "rank", 0) % getattr(parallel, "tensor_parallel_size", 1) == 0
    room = vllm_config.scheduler_config.max_num_batched_tokens
    return Tracing(
        path if first else None, settings.trace_tokens, fingerprint, str(vllm_config.model_config.model), room, device
    )


def requests_of(runner: Any, result: Any, count: int) -> Sequence[str]:
    """The names of a step's requests, of either generation of vLLM's runner."""
    return getattr(result, "req_ids", runner.input_batch.req_ids if hasattr(runner, "input_batch") else ())[:count]
