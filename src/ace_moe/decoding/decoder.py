"""Decoding that is not bound by the host: one CUDA graph per step over a static cache.

    decoder = Decoder(model, batch=1, length=4096)
    tokens = decoder.generate(ids, 256)

Layers are compiled one build at a time and the whole step is captured once. Budgets live in tensors: changing one between
two steps needs no new graph. `generate(cache_implementation="static")` of transformers works as well; it compiles longer
and its attention copies the cache for every query head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..budget import Phase
from ..engines.transformers import Attachment, attached_to
from ..engines.transformers.host import hosted, place_experts, settle
from ..errors import IntegrationError, OptionError, brief
from ..kernels import foreign
from .attention import IMPLEMENTATION, workspace
from .layerwise import compiled_layers, decoder_layers, recording
from .static import StepCache, check


def tuned(batch: int, fused: bool = True) -> dict[str, Any]:
    """Return compiler options: kernels may start before the one in front has ended; with one row, products become reductions.

    `fused`: layers are rewritten first (`fuse`), and such products are ours: there is nothing left that is worth a search.
    """
    from torch._inductor import config

    early = {"triton.enable_pdl": True} if hasattr(config.triton, "enable_pdl") else {}
    options: dict[str, Any] = {"coordinate_descent_tuning": batch == 1 and not fused, **early}
    if fused:
        from .fuse import fuse

        options["pre_grad_custom_pass"] = fuse
    return options


def _gpu(model: PreTrainedModel) -> torch.device:
    """Find the GPU that reads experts in host memory."""
    if not torch.cuda.is_available():
        raise IntegrationError(
            "Experts in host memory are for a GPU that is too small for them, and there is none here."
        )
    return model.device if model.device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


class Decoder:
    """Greedy decoding of `batch` sequences of at most `length` tokens, without padding."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        length: int,
        attention: str = IMPLEMENTATION,
        captured: bool | None = None,
        experts: Literal["device", "host"] = "device",
        resident: float = 0.0,
        fused: bool = True,
        **options: Any,
    ):
        """`captured`: whether steps are compiled and become a graph; by default on a GPU. `options` go to the compiler, over our
        own.

        `experts="host"` moves the model to the GPU but for its experts, of which the part `resident` has copies there;
        then attach a plan: its kernels read what a step needs over the bus. `fused`: layers are rewritten before they are
        compiled, so that a step has fewer launches (`fuse`).
        """
        for name, size in (("batch", batch), ("length", length)):
            if type(size) is not int or size < 1:
                raise OptionError(f"{name} is a whole number of at least 1, not {size!r}.")
        if experts not in ("device", "host"):
            raise OptionError(f'experts is "device" or "host", not {experts!r}.')
        if experts == "host":
            place_experts(model, _gpu(model), resident)
        ours = not foreign(model.device)  # other GPUs have graphs all the same
        self.model, self.batch, self.length, self.attention = model, batch, length, attention if ours else "sdpa"
        self.captured = model.device.type == "cuda" if captured is None else captured
        self.options = {**tuned(batch, fused and ours), **options}
        check(model)
        decoder_layers(model)
        self.cache: StepCache | None = None
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.tokens = 0  # in the cache, without asking the device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recorded: Attachment | None = None  # what the graph skips by
        self.logits: Tensor | None = None

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """Read ids [B, S] into an empty cache; returns logits [B, V] of the next token."""
        self._check(ids)
        if hosted(self.model) and attached_to(self.model) is None:
            raise IntegrationError(
                "Experts in host memory are read by a plan's kernels: attach one, at threshold 0 if need be."
            )
        if self.recorded is not attached_to(self.model):
            self.graph = None  # it would go on by the plan of its time, also where that is gone
        prompt = DynamicCache(config=self.model.config)
        with self._phase("prefill"):
            out = self._read(ids, prompt)
        if self.cache is None:
            self.cache = StepCache(prompt, self.length, self.model.device)
        self.cache.fill(prompt, ids.shape[1])
        self.tokens = ids.shape[1]
        return out

    def _check(self, ids: Tensor, new_tokens: int = 0) -> None:
        """Refuse a prompt that is none, or has no room here with what is to be generated."""
        shape = tuple(ids.shape) if isinstance(ids, Tensor) and not ids.is_floating_point() else type(ids).__name__
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise OptionError(f"A prompt is a tensor of token ids, [batch, tokens]; this is {shape}.")
        if new_tokens and shape[1] + new_tokens > self.length:
            raise OptionError(f"{shape[1]} + {new_tokens} tokens do not fit into a cache of {self.length}.")
        if shape[0] != self.batch or not 0 < shape[1] < self.length:
            raise OptionError(
                f"This decoder takes {self.batch} sequences of 1 to {self.length - 1} tokens, not {shape}."
            )

    def settle(self, ids: Tensor) -> None:
        """Run a text [B, S] and keep copies of the experts it used most on the GPU, where there is room for copies."""
        settle(self.model, lambda: self.prefill(ids))

    def _read(self, ids: Tensor, prompt: DynamicCache) -> Tensor:
        try:
            return self.model(input_ids=ids, past_key_values=prompt, logits_to_keep=1).logits[:, -1]
        except ValueError as error:  # a model with a cache of its own says so
            raise IntegrationError(
                f"{type(self.model).__name__} could not read a prompt into transformers' cache ({brief(error)}); decode it with "
                "`generate` instead."
            ) from error

    def _phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Say what the tokens of a pass are, which the decoder knows; nothing of it is computed in a step."""
        attachment = attached_to(self.model)
        return nullcontext() if attachment is None else attachment.phase(phase)

    def rewind(self, length: int) -> None:
        """Forget what came after the first `length` tokens; with states or windows, after the prompt."""
        cache = self._filled
        if not 0 <= length <= self.tokens:
            raise OptionError(f"There are {self.tokens} tokens to go back in; {length} is none of their places.")
        cache.rewind(length)
        self.tokens = length

    @property
    def _filled(self) -> StepCache:
        if self.cache is None:
            raise OptionError("There is nothing to go on from: run a prompt first, with `prefill`.")
        return self.cache

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        """Decode token [B, 1] → logits [B, V] of the next; the same memory at every step."""
        cache = self._filled
        if self.tokens == self.length:
            raise OptionError(f"The cache has room for {self.length} tokens and is full. Make a decoder with more.")
        self.token.copy_(token)
        if self.captured and self.graph is None:
            self.recorded = attached_to(self.model)
            self._capture(cache)
        if self.graph is not None:
            self.graph.replay()
        else:
            with compiled_layers(self.model, cache, compiled=False):
                self.logits = self._advance(cache)
        self.tokens += 1
        assert self.logits is not None
        return self.logits

    def generate(self, ids: Tensor, new_tokens: int, stop: Sequence[int] | None = None) -> Tensor:
        """Return the prompt and at most `new_tokens` more, each the likeliest: [B, S + n].

        A sequence ends at a token of `stop` (by default the model's own end tokens) and is padded from there; none are
        looked for where `stop` is empty, and no step then waits for the one before.
        """
        if new_tokens < 1:
            raise OptionError(f"There is nothing to generate: ask for at least 1 token, not {new_tokens}.")
        self._check(ids, new_tokens)
        ends, padding = self._ends(stop)
        logits, out = self.prefill(ids), [ids]
        ended = torch.zeros(self.batch, 1, dtype=torch.bool, device=ids.device)
        for _ in range(new_tokens):
            out.append(logits.argmax(-1, keepdim=True).masked_fill(ended, padding))
            ended |= torch.isin(out[-1], ends)
            if len(out) > new_tokens or (len(ends) and bool(ended.all())):
                break
            logits = self.step(out[-1])
        return torch.cat(out, 1)

    def _ends(self, stop: Sequence[int] | None) -> tuple[Tensor, int]:
        """(tokens that end a sequence, token that follows such an end)."""
        known = getattr(self.model, "generation_config", self.model.config)
        stop = known.eos_token_id if stop is None else list(stop)
        ends = torch.tensor([] if stop is None else stop, dtype=torch.long, device=self.model.device).flatten()
        padding = known.pad_token_id if known.pad_token_id is not None else int(ends[0]) if len(ends) else 0
        return ends, padding

    def _advance(self, cache: StepCache) -> Tensor:
        """Run one step as it is captured, and move on by one."""
        eager = self.model.config._attn_implementation == "eager"  # adds its mask; all others take what is true in it
        cache.begin(self.batch, self.model.dtype if eager else torch.bool)
        options = {"past_key_values": cache, "position_ids": cache.written.view(1, 1), "attention_mask": cache.mask}
        with self._phase("decode"):
            out = self.model(input_ids=self.token, **options).logits[:, -1]
        cache.written.add_(1)
        return out

    def _capture(self, cache: StepCache) -> None:
        """Record a step. Warming up writes where the next step will write again, or is rewound, and is not counted."""
        model, before, start = self.model, self.model.config._attn_implementation, int(cache.written)
        attachment = attached_to(model)
        workspace(model.device)
        if before == "sdpa":  # what else a model was given knows more than SDPA does, such as sinks
            model.set_attn_implementation(self.attention)
        try:
            with (
                torch.cuda.device(model.device),  # streams are the current GPU's
                nullcontext() if attachment is None else attachment.deciders.uncounted(),
                compiled_layers(model, cache, **self.options),
                recording(model),
            ):
                self._warm_up(cache, start)
                graph = torch.cuda.CUDAGraph()
                # a stream of its own: torch keeps the one it made first, on whatever device that was
                with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                    self.logits = self._advance(cache)
                self.graph = graph
        finally:
            model.set_attn_implementation(before)

    def _warm_up(self, cache: StepCache, start: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._advance(cache)
                cache.rewind(start)
        torch.cuda.current_stream().wait_stream(stream)
