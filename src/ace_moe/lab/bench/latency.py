"""TTFT and TPOT of one model as it stands: prompts and decode steps, compiled layer by layer, each in one CUDA graph.

Stock and ours go through the same code, so what differs is the experts. On a CPU both run uncompiled: the numbers are for
comparing there. What no graph can hold is run as it is, and its steps by `generate`; `loop` says which it was.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...decoding import Decoder
from ...decoding.layerwise import compiled_layers, recording

STEPS = 16  # tokens of one timed decode
# SDPA under a name that transformers knows no mask for: while a CUDA graph is recorded it would make one, which a whole
# prompt without padding does not need and which costs SDPA its fastest kernel
WHOLE = "ace_whole"
AttentionInterface.register(WHOLE, sdpa_attention_forward)


@dataclass(frozen=True)
class Timing:
    """Milliseconds: medians, and the spread between the quartiles of wall time."""

    wall: float
    gpu: float | None
    spread: float

    @property
    def ms(self) -> float:
        """Milliseconds of the GPU, where there is one."""
        return self.wall if self.gpu is None else self.gpu


def median(
    step: Callable[[], Any], repeats: int, device: torch.device, prepare: Callable[[], None] = lambda: None
) -> Timing:
    walls, gpus = [], []
    for _ in range(repeats):
        prepare()
        wall, gpu = once(step, device)
        walls.append(wall)
        gpus.append(gpu)
    quarters = statistics.quantiles(walls, n=4) if repeats > 1 else [walls[0]] * 3
    gpu_median = statistics.median(g for g in gpus if g is not None) if gpus[0] is not None else None
    return Timing(statistics.median(walls), gpu_median, quarters[2] - quarters[0])


def once(step: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """Milliseconds by the clock, and of the GPU where there is one."""
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


class Prompt:
    """A whole prompt and the logits of its last token, ready to be timed; budgets may change between timings."""

    loop = "graph"

    def __init__(self, model: PreTrainedModel, ids: Tensor, compiled: bool = True):
        self.model, self.ids = model, ids
        self.run: Callable[[], Any] = self._forward
        if not compiled or model.device.type != "cuda":
            self.loop = "plain"
        else:
            self.run = self._capture()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits

    def _capture(self) -> Callable[[], Any]:
        before = self.model.config._attn_implementation
        if before == "sdpa" and narrowest_window(self.model) >= self.ids.shape[1]:
            self.model.set_attn_implementation(WHOLE)
        try:
            with compiled_layers(self.model), recording(self.model):
                for _ in range(2):
                    self._forward()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._forward()
        finally:
            self.model.set_attn_implementation(before)
        return graph.replay

    def time(self, repeats: int = 5) -> Timing:
        """TTFT."""
        self.run()
        return median(self.run, repeats, self.model.device)


def narrowest_window(model: PreTrainedModel) -> float:
    """Tokens that the layer which sees the fewest can see."""
    layers = DynamicCache(config=model.config).layers
    return min((layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")), default=math.inf)


class Steps:
    """Decode steps after a prompt, ready to be timed; every timing starts from the same cache. tokens [B, prompt + STEPS]."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, **options: Any):
        self.model, self.tokens, self.prompt = model, tokens, tokens.shape[1] - STEPS
        self.decoder = Decoder(model, *tokens.shape, **options)
        self.loop = "graph" if self.decoder.captured else "plain"
        self.decoder.prefill(tokens[:, : self.prompt])
        self.run()

    def rewind(self) -> None:
        self.decoder.rewind(self.prompt)

    def run(self) -> None:
        for i in range(STEPS):
            self.decoder.step(self.tokens[:, self.prompt + i : self.prompt + i + 1])

    def time(self, repeats: int = 5) -> Timing:
        """TPOT, after as many steps untimed: what ran before may have waited for the host and let the clocks sink."""
        self.rewind()
        self.run()
        found = median(self.run, repeats, self.model.device, self.rewind)
        gpu = None if found.gpu is None else found.gpu / STEPS
        return Timing(found.wall / STEPS, gpu, found.spread / STEPS)


class Generated(Steps):
    """The same steps as transformers' `generate(cache_implementation="static")` runs them: the model compiled whole."""

    loop = "generate, static"

    def __init__(self, model: PreTrainedModel, tokens: Tensor):
        self.model, self.tokens, self.prompt = model, tokens, tokens.shape[1] - STEPS
        self.cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1])
        self.token = tokens[:, :1].clone()
        self.position = torch.zeros(len(tokens), 1, dtype=torch.long, device=model.device)
        options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        graphs = {"triton.cudagraphs": True} if model.device.type == "cuda" else {}
        self.step = torch.compile(model, fullgraph=True, options={**options, **graphs})
        for _ in range(2):
            self.rewind()
            self.run()

    @torch.no_grad()
    def rewind(self) -> None:
        """Run the prompt again: windows and states cannot be wound back."""
        self.cache.reset()
        self.model(input_ids=self.tokens[:, : self.prompt], past_key_values=self.cache, logits_to_keep=1)

    @torch.no_grad()
    def run(self) -> None:
        for i in range(self.prompt, self.prompt + STEPS):
            self.token.copy_(self.tokens[:, i : i + 1])
            self.position.fill_(i)
            self.step(input_ids=self.token, past_key_values=self.cache, position_ids=self.position)


class Ticks(BaseStreamer):
    """When `generate` gave each token; the first call is the prompt's."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, list[float]()

    def put(self, value: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """There is nothing to flush."""


class Loop:
    """Greedy steps of `generate` as it stands, for models that no graph can hold: the time between its tokens."""

    loop = "generate"

    def __init__(self, model: PreTrainedModel, tokens: Tensor):
        self.model, self.ids = model, tokens[:, :-STEPS]

    @torch.no_grad()
    def _once(self) -> list[float]:
        """Milliseconds of each step."""
        ticks = Ticks(self.model.device)
        self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=STEPS + 1, do_sample=False, eos_token_id=None,
            pad_token_id=0, streamer=ticks,
        )  # fmt: skip
        return [1e3 * (b - a) for a, b in pairwise(ticks.times[1:])]

    def time(self, repeats: int = 5) -> Timing:
        """TPOT."""
        steps = [step for _ in range(repeats) for step in self._once()]
        quarters = statistics.quantiles(steps, n=4)
        return Timing(statistics.median(steps), None, quarters[2] - quarters[0])
