"""Where a prompt ends: told by `generate`, and by continuous batching for each of its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .passes import PROMPTS, Pass


class GenerateHook:
    """`model.generate` of an attached model: notes where the prompt ends and where it starts, then is the model's own.

    Neither a model's input preparation nor its prefill is enough: assisted decoding begins with a pass of the prompt and
    its first candidates.
    """

    def __init__(self, model: PreTrainedModel, passes: list[Pass]):
        self.model, self.passes = ref(model), passes
        self._drafting: dict[int, int | None] = {}  # by thread: the prompt of the text a draft model is called for
        wraps(type(model).generate)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        assert model is not None
        # a model that drafts for itself keeps the outer prompt
        inside = any(p.context.prompt is not None for p in self.passes)
        prompt, start = (None, None) if inside else prompt_of(model, args, kwargs)
        if prompt is None:
            return type(model).generate(model, *args, **kwargs)
        drafts = bool(getattr(kwargs.get("generation_config"), "is_assistant", False))
        if drafts:
            prompt = self._first(prompt, kwargs)
        before = [one.context for one in self.passes]
        try:
            for one in self.passes:
                end = torch.tensor(prompt, device=model.device)
                one.set_context(one.context._replace(prompt=end, start=start, drafts=drafts))
            return type(model).generate(model, *args, **kwargs)
        finally:
            for one, told in zip(self.passes, before, strict=True):
                one.set_context(told)

    def _first(self, prompt: int | None, kwargs: dict[str, Any]) -> int | None:
        """A draft model is called again and again for one text, with more of it each time: its prompt is the first call's."""
        me = threading.get_ident()
        if kwargs.get("past_key_values") is None:
            self._drafting[me] = prompt
        return self._drafting.get(me, prompt)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model generates for itself."""
        model = self.model()
        copied = memo.get(id(model))
        return self if copied is None else MethodType(type(copied).generate, copied)


def prompt_of(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int | None, Tensor | None]:
    """(tokens before the first generated one, first real token of each row [B]); None where the arguments do not say."""
    if getattr(model.config, "is_encoder_decoder", False):
        given = kwargs.get("decoder_input_ids")
        return (1 if given is None else int(given.shape[1])), None
    given = next(
        (
            x
            for x in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1])
            if _shaped(x)
        ),
        None,
    )
    if given is None:
        return 1, None  # transformers starts with a BOS token
    mask: Any = kwargs.get("attention_mask")
    length = _length(int(given.shape[1]), kwargs.get("past_key_values"), mask)
    return length, _first_real(mask) if _shaped(mask) else _first_unpadded(model, given)


def _length(new: int, cache: Any, mask: Any) -> int:
    """Tokens of a prompt of which a filled cache may hold some: transformers takes whole prompts, and the new tokens alone
    with a mask of the whole."""
    had = int(getattr(cache, "get_seq_length", lambda: 0)())
    alone = mask.shape[1] != new if had and _shaped(mask) and mask.dim() == 2 else had >= new
    return new + had if alone else new


def _shaped(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2


def _first_real(mask: Tensor) -> Tensor | None:
    return (mask != 0).int().argmax(1) if mask.dim() == 2 else None


def _first_unpadded(model: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """As transformers infers a mask: padding is the padding token, unless it also ends sequences."""
    settings = getattr(model, "generation_config", None)
    pad, ends = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    if pad is None or pad in ends or ids.is_floating_point():
        return None
    return _first_real(ids != pad)


# ---- continuous batching ----------------------------------------------------------------------------------------------


@cache
def listen() -> bool:
    """Have continuous batching keep each request's prompt length beside its other static inputs; False if it cannot.

    Without them a last prompt chunk of one token looks like a generated one. Once, on the class: the tensors are made and
    moved with its own, so they hold inside the graphs it captures and with two batches in flight. They travel on the
    paged cache, which the model is given; a model without a plan never looks.
    """
    try:
        from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs as IOs
    except ImportError:
        return False
    names = ("_setup_static_tensors", "prepare_batch_tensors", "_transfer_inputs", "get_model_kwargs")
    if not all(hasattr(IOs, name) for name in names):
        return False
    for name, wrap in zip(names, (_make, _write, _move, _hand_over), strict=True):
        setattr(IOs, name, wrap(getattr(IOs, name)))
    return True


LENGTHS = "_ace_prompt_lengths"


def _make(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        device = self.cumulative_seqlens_q.device
        setattr(self, LENGTHS, torch.zeros(len(self.cumulative_seqlens_q), dtype=torch.int32, device=device))
        return found

    return made


def _write(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def written(self: Any, requests_in_batch: Any, *args: Any, **kwargs: Any) -> Any:
        states = [future.state for future in requests_in_batch]
        lengths = [int(getattr(s, "_true_initial_tokens", 0) or len(s.initial_tokens)) for s in states]
        buffer = getattr(self, LENGTHS, None)
        if buffer is not None:
            buffer[: len(lengths)] = torch.tensor(lengths, dtype=buffer.dtype)
        return stock(self, requests_in_batch, *args, **kwargs)

    return written


def _move(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def moved(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, other, *args, **kwargs)
        if hasattr(self, LENGTHS) and hasattr(other, LENGTHS):
            getattr(other, LENGTHS).copy_(getattr(self, LENGTHS), non_blocking=True)
        return found

    return moved


def _hand_over(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def handed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, LENGTHS):
            setattr(self.cache, PROMPTS, getattr(self, LENGTHS))
        return stock(self, *args, **kwargs)

    return handed
