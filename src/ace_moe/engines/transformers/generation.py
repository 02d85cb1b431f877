"""Where a prompt ends, as `generate` knows it, and continuous batching for each of its requests."""

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

from .passes import PROMPTS, Pass, with_context


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
        nested = any(one.context.prompt is not None for one in self.passes)
        prompt, start = (None, None) if nested else prompt_of(model, args, kwargs)
        if prompt is None:
            return type(model).generate(model, *args, **kwargs)
        drafts = bool(getattr(kwargs.get("generation_config"), "is_assistant", False))
        if drafts:  # called again and again for one text, with more of it each time: its prompt is the first call's
            thread = threading.get_ident()
            if kwargs.get("past_key_values") is None:
                self._drafting[thread] = prompt
            prompt = self._drafting.get(thread, prompt)
        end = torch.tensor(prompt, device=model.device)
        with with_context(self.passes, prompt=end, start=start, drafts=drafts):
            return type(model).generate(model, *args, **kwargs)

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
        decoded = kwargs.get("decoder_input_ids")
        return (1 if decoded is None else int(decoded.shape[1])), None
    candidates = (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), kwargs.get("inputs"), *args[:1])
    sequences = next((x for x in candidates if _shaped(x)), None)
    if sequences is None:
        return 1, None  # transformers starts with a BOS token
    mask: Any = kwargs.get("attention_mask")
    length = _length(int(sequences.shape[1]), kwargs.get("past_key_values"), mask)
    real = mask if _shaped(mask) else _not_padding(model, sequences)
    return length, (real != 0).int().argmax(1) if real is not None and real.dim() == 2 else None


def _length(new: int, cache: Any, mask: Any) -> int:
    """Tokens of a prompt of which a filled cache may hold some: transformers takes whole prompts, and the new tokens alone
    with a mask of the whole."""
    cached = int(getattr(cache, "get_seq_length", lambda: 0)())
    alone = mask.shape[1] != new if cached and _shaped(mask) and mask.dim() == 2 else cached >= new
    return new + cached if alone else new


def _shaped(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2


def _not_padding(model: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """The mask [B, L] that transformers infers: padding is the padding token, unless it also ends sequences."""
    settings = getattr(model, "generation_config", None)
    pad, ends = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    return None if pad is None or pad in ends or ids.is_floating_point() else ids != pad


# ---- continuous batching ----------------------------------------------------------------------------------------------

LENGTHS = "_ace_prompt_lengths"


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
    steps = {
        "_setup_static_tensors": _make,
        "prepare_batch_tensors": _write,
        "_transfer_inputs": _move,
        "get_model_kwargs": _hand_over,
    }
    if not all(hasattr(IOs, name) for name in steps):
        return False
    for name, step in steps.items():
        setattr(IOs, name, _followed(getattr(IOs, name), step))
    return True


def _followed(stock: Callable[..., Any], step: Callable[..., None]) -> Callable[..., Any]:
    """A method of transformers' with a step of ours behind it."""

    @wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        step(self, *args, **kwargs)
        return result

    return method


def _make(ios: Any, *_: Any, **__: Any) -> None:
    ends = ios.cumulative_seqlens_q
    setattr(ios, LENGTHS, torch.zeros(len(ends), dtype=torch.int32, device=ends.device))


def _write(ios: Any, requests_in_batch: Any, *_: Any, **__: Any) -> None:
    states = [future.state for future in requests_in_batch]
    lengths = [int(getattr(s, "_true_initial_tokens", 0) or len(s.initial_tokens)) for s in states]
    if (static := getattr(ios, LENGTHS, None)) is not None:  # else they were made before anybody listened
        static[: len(lengths)] = torch.tensor(lengths, dtype=static.dtype)


def _move(ios: Any, other: Any, *_: Any, **__: Any) -> None:
    if hasattr(ios, LENGTHS) and hasattr(other, LENGTHS):
        getattr(other, LENGTHS).copy_(getattr(ios, LENGTHS), non_blocking=True)


def _hand_over(ios: Any, *_: Any, **__: Any) -> None:
    if hasattr(ios, LENGTHS):
        setattr(ios.cache, PROMPTS, getattr(ios, LENGTHS))
