"""TTFT and TPOT of one model as it stands: prompts and decode steps, compiled layer by layer, each in one CUDA graph.

Stock and ours go through the same code, so what differs is the experts. On a CPU both run uncompiled: the numbers are for
comparing there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..decoding import Decoder
from ..decoding.layerwise import compiled_layers

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


def median(
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


class Prompt:
    """A whole prompt and the logits of its last token, ready to be timed; budgets may change between timings."""

    def __init__(self, model: PreTrainedModel, batch: int, tokens: int, compiled: bool = True):
        self.model, self.ids = model, random_ids(model, batch, tokens)
        self.run: Callable[[], Any] = self._forward
        if model.device.type == "cuda":
            self.run = self._capture(compiled)

    @torch.no_grad()
    def _forward(self) -> Tensor:
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits

    def _capture(self, compiled: bool) -> Callable[[], Any]:
        """One graph; uncompiled for experts that sync with the host are run as they are."""
        if not compiled:
            return self._forward
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(WHOLE)
        try:
            with compiled_layers(self.model):
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


class Steps:
    """Decode steps after a prompt, ready to be timed; every timing starts from the same cache."""

    def __init__(self, model: PreTrainedModel, batch: int, prompt: int, **options: Any):
        self.model, self.prompt = model, prompt
        self.tokens = random_ids(model, batch, prompt + STEPS, seed=1)
        self.decoder = Decoder(model, batch, prompt + STEPS, **options)
        self.decoder.prefill(self.tokens[:, :prompt])
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

    def __init__(self, model: PreTrainedModel, batch: int, prompt: int):
        self.model, self.prompt = model, prompt
        self.tokens = random_ids(model, batch, prompt + STEPS, seed=1)
        self.cache = StaticCache(config=model.config, max_cache_len=prompt + STEPS)
        self.token = self.tokens[:, :1].clone()
        self.position = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        graphs = {"triton.cudagraphs": True} if model.device.type == "cuda" else {}
        self.step = torch.compile(model, fullgraph=True, options={**options, **graphs})
        with torch.no_grad():
            model(input_ids=self.tokens[:, :prompt], past_key_values=self.cache, logits_to_keep=1)
        for _ in range(2):
            self.rewind()
            self.run()

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.prompt)

    @torch.no_grad()
    def run(self) -> None:
        for i in range(self.prompt, self.prompt + STEPS):
            self.token.copy_(self.tokens[:, i : i + 1])
            self.position.fill_(i)
            self.step(input_ids=self.token, past_key_values=self.cache, position_ids=self.position)
