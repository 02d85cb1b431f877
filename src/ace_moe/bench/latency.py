"""TTFT and TPOT of one model, stock and ours, at several ratios.

Prefill is one CUDA graph of the whole forward. Decode is the compiled step with a static cache and CUDA graphs, as
`generate(cache_implementation="static")` runs it. On a CPU both run as they are: the numbers are for comparing there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

PROMPT = 256  # tokens in the cache before decoding starts


@dataclass(frozen=True)
class Timing:
    """Milliseconds: medians, and the spread between the quartiles of wall time."""

    wall: float
    gpu: float | None
    spread: float


def _median(
    step: Callable[[], Any], repeats: int, device: torch.device, prepare: Callable[[], None] = lambda: None
) -> Timing:
    walls, gpus = [], []
    for _ in range(repeats):
        prepare()
        wall, gpu = _once(step, device)
        walls.append(wall)
        gpus.append(gpu)
    quarters = statistics.quantiles(walls, n=4) if repeats > 1 else [walls[0]] * 3
    gpu_median = statistics.median(g for g in gpus if g is not None) if gpus[0] is not None else None
    return Timing(statistics.median(walls), gpu_median, quarters[2] - quarters[0])


def _once(step: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3, None
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, before.elapsed_time(after)


def random_ids(model: PreTrainedModel, batch: int, tokens: int, seed: int = 0) -> Tensor:
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator(model.device).manual_seed(seed)
    return torch.randint(5, vocabulary, (batch, tokens), device=model.device, generator=generator)


@torch.inference_mode()
def first_token(model: PreTrainedModel, batch: int, tokens: int, repeats: int = 5) -> Timing:
    """TTFT: the whole prompt, logits of its last token."""
    ids = random_ids(model, batch, tokens)

    def step() -> Tensor:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    for _ in range(2):
        step()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return _median(graph.replay, repeats, model.device)
    return _median(step, repeats, model.device)


class Decoder:
    """A model's decode step for one batch size, compiled once; budgets may change between timings."""

    def __init__(self, model: PreTrainedModel, batch: int, steps: int = 16):
        torch._dynamo.reset()
        self.model, self.steps = model, steps
        self.ids = random_ids(model, batch, PROMPT + steps, seed=1)
        self.cache = StaticCache(config=model.config, max_cache_len=PROMPT + steps)
        self.token, self.position = (
            self.ids[:, :1].clone(),
            torch.zeros(batch, 1, dtype=torch.long, device=model.device),
        )
        with torch.no_grad():
            model(input_ids=self.ids[:, :PROMPT], past_key_values=self.cache, logits_to_keep=1)
        self.step = compiled(model) if model.device.type == "cuda" else model
        for _ in range(2):
            self._rewind()
            self._run()

    def _rewind(self) -> None:
        """Back to the end of the prompt, so that every run sees a cache of the same length and none outgrows it."""
        for layer in self.cache.layers:
            if isinstance(getattr(layer, "cumulative_length", None), Tensor):
                layer.cumulative_length.fill_(PROMPT)

    @torch.no_grad()
    def _run(self) -> None:
        for i in range(self.steps):
            self.token.copy_(self.ids[:, PROMPT + i : PROMPT + i + 1])
            self.position.fill_(PROMPT + i)
            self.step(input_ids=self.token, past_key_values=self.cache, position_ids=self.position)

    def time(self, repeats: int = 5) -> Timing:
        """TPOT, over runs of `steps` tokens each."""
        found = _median(self._run, repeats, self.model.device, self._rewind)
        gpu = None if found.gpu is None else found.gpu / self.steps
        return Timing(found.wall / self.steps, gpu, found.spread / self.steps)


def compiled(model: PreTrainedModel) -> Any:
    """The decode step in one graph. Guards on the model's own modules are dropped: they do not change while it serves,
    and checking them at each of a few hundred tokens a second would cost more than skipping saves."""
    options: dict[str, Any] = {
        "triton.cudagraphs": True,
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    }
    return torch.compile(model, fullgraph=True, options=options)
